//! Heads for CLIP, in a safetensors file with the names of LAION's aesthetic predictor.

use std::collections::BTreeSet;
use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::Result;
use super::weights::WeightFiles;
use crate::clip::Head;

/// A file of linear layers, opened and checked: `layers.N.weight` `[outputs, inputs]` and `layers.N.bias`
/// `[outputs]`, in ascending order of N, which may have gaps. The last one has one output.
#[derive(Debug)]
pub struct HeadFile {
    files: WeightFiles,
    layers: BTreeSet<u32>,
}

impl HeadFile {
    /// Opens the file at `path`, whose first layer must read vectors of `width`.
    ///
    /// # Errors
    /// [`Error`](super::Error), which names the tensor that is missing, unknown or of another shape.
    pub fn open(path: &Path, width: i64) -> Result<HeadFile> {
        let files = WeightFiles::open_file(path)?;
        let layer = |name: &str| {
            let foreign = "is not part of a head: names are `layers.N.weight` and `layers.N.bias`";
            layer_of(name).ok_or_else(|| files.problem(name, foreign.into()))
        };
        let layers = files.names().into_iter().map(layer).collect::<Result<_>>()?;
        let head = HeadFile { files, layers };
        head.check(width)?;
        Ok(head)
    }

    /// Loads the layers to `device`, in fp32.
    ///
    /// # Errors
    /// [`Error::Read`](super::Error::Read) if the file is no longer readable, or libtorch's (out of memory).
    pub fn load(&self, device: Device) -> crate::Result<Head> {
        let tensor = |name: &str| -> crate::Result<Tensor> {
            Ok(self.files.tensor(name, device)?.f_to_kind(Kind::Float)?)
        };
        let load = |&layer: &u32| {
            let [weight, bias] = names(layer);
            Ok([tensor(&weight)?, tensor(&bias)?])
        };
        Ok(Head(self.layers.iter().map(load).collect::<crate::Result<_>>()?))
    }

    /// Checks that each layer reads the outputs of the one before.
    fn check(&self, width: i64) -> Result<()> {
        let missing = || self.files.problem(&names(0)[0], "is missing".into());
        let last = *self.layers.last().ok_or_else(missing)?;
        let mut inputs = width;
        for &layer in &self.layers {
            let [weight, bias] = names(layer);
            let found = self.shape(&weight)?;
            let outputs = match found {
                &[outputs, columns] if columns == inputs && (layer != last || outputs == 1) => outputs,
                _ => {
                    let rows = if layer == last { "1" } else { "outputs" };
                    let problem = format!("has shape {found:?}, must be [{rows}, {inputs}]");
                    return Err(self.files.problem(&weight, problem));
                }
            };
            let found = self.shape(&bias)?;
            if found != [outputs] {
                let problem = format!("has shape {found:?}, must be [{outputs}]");
                return Err(self.files.problem(&bias, problem));
            }
            inputs = outputs;
        }
        Ok(())
    }

    fn shape(&self, name: &str) -> Result<&[i64]> {
        let missing = || self.files.problem(name, "is missing, or not F32, BF16 or F16".into());
        self.files.shape(name).ok_or_else(missing)
    }
}

/// Returns the index of the layer that a tensor belongs to, if any.
fn layer_of(name: &str) -> Option<u32> {
    let (number, kind) = name.strip_prefix("layers.")?.split_once('.')?;
    number.parse().ok().filter(|_| matches!(kind, "weight" | "bias"))
}

/// Returns the names of a layer's tensors.
fn names(layer: u32) -> [String; 2] {
    ["weight", "bias"].map(|kind| format!("layers.{layer}.{kind}"))
}
