//! The shape of a diffusion transformer.

use crate::Result;
use crate::error::check_config;

/// The shape of a [`Dit`](super::Dit).
#[derive(Clone, Debug, PartialEq)]
pub struct DitConfig {
    /// Height and width of an image.
    pub image_size: i64,
    /// Channels of an image.
    pub channels: i64,
    /// Height and width of a patch; divides `image_size`.
    pub patch_size: i64,
    /// Number of classes; the label equal to it means no class.
    pub classes: i64,
    /// Width of the residual stream C.
    pub hidden_size: i64,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Number of heads H; divides C.
    pub heads: i64,
    /// Width of the feed-forward's hidden layer.
    pub intermediate_size: i64,
}

impl DitConfig {
    /// Checks that the sizes are valid.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and the valid values.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("image_size", self.image_size),
            ("channels", self.channels),
            ("patch_size", self.patch_size),
            ("classes", self.classes),
            ("hidden_size", self.hidden_size),
            ("heads", self.heads),
            ("intermediate_size", self.intermediate_size),
        ];
        for (field, size) in sizes {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        check_config(self.image_size % self.patch_size == 0, "patch_size", || {
            format!("is {}, must divide image_size = {}", self.patch_size, self.image_size)
        })?;
        check_config(self.hidden_size % self.heads == 0, "heads", || {
            format!("is {}, must divide hidden_size = {}", self.heads, self.hidden_size)
        })
    }

    /// Returns the number of patches in a row of an image.
    pub(super) fn patches_per_row(&self) -> i64 {
        self.image_size / self.patch_size
    }

    /// Returns the number of values of a patch.
    pub(super) fn patch_len(&self) -> i64 {
        self.channels * self.patch_size * self.patch_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn contradictions_name_their_field() {
        let small = DitConfig {
            image_size: 8,
            channels: 1,
            patch_size: 2,
            classes: 4,
            hidden_size: 48,
            layers: 2,
            heads: 4,
            intermediate_size: 192,
        };
        let check = |field: &str, change: fn(&mut DitConfig)| {
            let mut config = small.clone();
            change(&mut config);
            match config.validate() {
                Err(Error::Config { field: found, .. }) => assert_eq!(found, field),
                other => panic!("{field}: {other:?}"),
            }
        };
        small.validate().unwrap();
        check("classes", |config| config.classes = 0);
        check("patch_size", |config| config.patch_size = 3);
        check("heads", |config| config.heads = 5);
    }
}
