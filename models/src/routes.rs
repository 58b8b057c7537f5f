//! Experts that tokens went to in sampling, for training that sends them to the same ones: routing replay (R3, Ma et
//! al., 2510.11370).

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::{Error, Result};

/// Sizes of a token's [`Routes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteShape {
    /// Number of layers with experts.
    pub layers: usize,
    /// Number of experts per token J.
    pub per_token: usize,
    /// Number of experts E of a layer.
    pub experts: i64,
}

impl RouteShape {
    /// Returns the number of experts that a token goes to in all layers.
    pub fn choices(self) -> usize {
        self.layers * self.per_token
    }

    /// Returns the bytes of a token's routes.
    pub fn token_bytes(self) -> usize {
        self.choices() * self.kind().elt_size_in_bytes()
    }

    /// Returns the integers in which experts are kept: 8 bits if all fit.
    pub(crate) fn kind(self) -> Kind {
        if self.experts <= 256 { Kind::Uint8 } else { Kind::Int16 }
    }

    /// Returns the routes of rows on the host: of integers `[..., layers, J]` those of [`Self::kind`], byte by byte. Waits for the
    /// device.
    pub(crate) fn bytes_of(self, rows: &Tensor) -> Result<Vec<u8>> {
        let rows = rows.f_to_kind(self.kind())?.f_to_device(tch::Device::Cpu)?.f_contiguous()?;
        let mut bytes = vec![0; rows.numel() * self.kind().elt_size_in_bytes()];
        rows.f_copy_data_u8(&mut bytes, rows.numel())?;
        Ok(bytes)
    }

    /// Returns the same of each row, for those that belong to different sequences.
    pub(crate) fn of_rows(self, rows: &Tensor) -> Result<Vec<Vec<u8>>> {
        Ok(self.bytes_of(rows)?.chunks_exact(self.token_bytes()).map(<[u8]>::to_vec).collect())
    }
}

/// Experts of a sequence's first tokens, token by token and layer by layer. As text they are base64.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Routes(Vec<u8>);

impl Routes {
    /// Returns the number of tokens.
    pub fn tokens(&self, shape: RouteShape) -> usize {
        self.0.len() / shape.token_bytes()
    }

    /// Appends the bytes of tokens.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Returns the experts of each token.
    ///
    /// # Errors
    /// [`Error::Input`] if an expert does not exist, or the bytes are of other sizes: they are of another model.
    pub(crate) fn experts(&self, shape: RouteShape) -> Result<Vec<i16>> {
        let experts: Vec<i16> = match shape.kind() {
            Kind::Uint8 => self.0.iter().map(|&byte| byte.into()).collect(),
            _ => self.0.chunks_exact(2).map(|pair| i16::from_ne_bytes([pair[0], pair[1]])).collect(),
        };
        let exist = experts.iter().all(|&expert| (0..shape.experts).contains(&expert.into()));
        if !exist || !self.0.len().is_multiple_of(shape.token_bytes()) {
            let problem = format!("are not of a model with {shape:?}");
            return Err(Error::Input { what: "routes", problem });
        }
        Ok(experts)
    }
}

impl From<Routes> for String {
    fn from(Routes(bytes): Routes) -> String {
        STANDARD.encode(bytes)
    }
}

impl TryFrom<String> for Routes {
    type Error = base64::DecodeError;

    fn try_from(text: String) -> Result<Routes, base64::DecodeError> {
        STANDARD.decode(text).map(Routes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_as_narrow_as_the_experts_allow() {
        for (experts, kind, bytes) in [(256, Kind::Uint8, 6), (257, Kind::Int16, 12)] {
            let shape = RouteShape { layers: 3, per_token: 2, experts };
            assert_eq!((shape.kind(), shape.token_bytes()), (kind, bytes));
            let chosen = [0, 255, 7, 255, 1, 2, 3, 4, 200, 6, 128, 127];
            let mut routes = Routes::default();
            routes.append(&shape.bytes_of(&Tensor::from_slice(&chosen).view([2, 3, 2])).unwrap());
            assert_eq!(routes.tokens(shape), 2);
            assert!(routes.experts(shape).unwrap().iter().map(|&expert| i32::from(expert)).eq(chosen));
            let text = serde_json::to_string(&routes).unwrap();
            assert_eq!(serde_json::from_str::<Routes>(&text).unwrap(), routes);
            // Experts or bytes of another model.
            assert!(routes.experts(RouteShape { experts: 200, ..shape }).is_err());
            assert!(routes.experts(RouteShape { layers: 5, ..shape }).is_err());
        }
        assert!(serde_json::from_str::<Routes>("\"?\"").is_err());
    }
}
