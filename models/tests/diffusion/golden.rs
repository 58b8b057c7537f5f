//! Results of diffusers for tiny random models: weights, inputs, outputs and gradients.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyroll_close::assert_close;
use anyroll_models::Model;
use serde_json::Value;
use tch::Tensor;

use crate::passes::{TOLERANCE, pass};

/// A file of `tests/golden`.
pub struct Golden {
    name: String,
    tensors: HashMap<String, Tensor>,
}

/// Returns the configs of a folder of `tests/golden`, and the file of each.
pub fn goldens(folder: &str) -> Vec<(Value, Golden)> {
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(folder);
    let text = std::fs::read_to_string(folder.join("configs.json")).unwrap();
    let configs: Value = serde_json::from_str(&text).unwrap();
    let configs = configs.get("configs").unwrap_or(&configs).as_object().unwrap().clone();
    assert!(configs.len() >= 2);
    let read = |(name, config): (String, Value)| {
        let tensors = Tensor::read_safetensors(folder.join(format!("{name}.safetensors"))).unwrap();
        (config, Golden { name, tensors: tensors.into_iter().collect() })
    };
    configs.into_iter().map(read).collect()
}

impl Golden {
    pub fn get(&self, what: &str) -> Tensor {
        self.tensors[what].shallow_clone()
    }

    /// Returns the names of the file's tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Asserts that a model with the file's weights gives the file's output and gradients, and has exactly
    /// the file's parameters.
    pub fn check<M: Model<Scores = Tensor, ScoresGrad = Tensor>>(&self, model: &M, batch: &M::Batch) {
        let parts = model.units().iter().flat_map(|unit| &unit.params).flat_map(|spec| &spec.parts);
        let ours: HashSet<&str> = parts.map(|part| part.name.as_str()).collect();
        let theirs = self.tensors.keys().filter_map(|key| key.strip_prefix("grad."));
        let theirs: HashSet<&str> = theirs.filter(|key| *key != "latents").collect();
        assert_eq!(ours, theirs, "{}", self.name);

        let whole = |spec: &anyroll_models::ParamSpec| {
            let parts: Vec<Tensor> = spec.parts.iter().map(|part| self.get(&part.name)).collect();
            let whole = Tensor::cat(&parts, 0);
            assert_eq!(whole.size(), spec.shape, "{}", spec.name);
            whole
        };
        let weights: Vec<Vec<Tensor>> =
            model.units().iter().map(|unit| unit.params.iter().map(whole).collect()).collect();
        let passed = pass(model, &weights, batch, &[self.get("d_output")]);
        self.assert_close("output", &passed.output);
        self.assert_close("grad.latents", &passed.input_grad);
        for (unit, grads) in model.units().iter().zip(&passed.grads) {
            for (spec, grad) in unit.params.iter().zip(grads.views()) {
                let mut row = 0;
                for part in &spec.parts {
                    self.assert_close(&format!("grad.{}", part.name), &grad.narrow(0, row, part.rows));
                    row += part.rows;
                }
            }
        }
    }

    pub fn assert_close(&self, what: &str, found: &Tensor) {
        assert_close(&format!("{}: {what}", self.name), found, &self.tensors[what], TOLERANCE);
    }
}

/// Returns a field of a config.
pub fn integer(config: &Value, field: &str) -> i64 {
    config[field].as_i64().unwrap_or_else(|| panic!("{field}"))
}
