//! The `python` reward of images: a user's function.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use anyroll_config::{ImageForm, PythonConfig};
use anyroll_data::Record;
use anyroll_reward::{Images, Python, StartError};
use tch::{Device, Tensor};

use super::frames::{as_images, is_video};
use super::scorer::Painted;
use crate::{
    Result,
    picture::{Picture, pixels},
};

/// Images scored in parallel, each by a process.
const WORKERS: usize = 4;

/// A function that scores one image at a time, with the record of its class or text.
#[derive(Debug)]
pub struct FunctionScorer {
    python: Python,
    form: ImageForm,
    records: Vec<Record>,
}

impl FunctionScorer {
    /// Starts a first process; `records` are those of the classes or texts.
    pub fn new(config: &PythonConfig, records: &[Record]) -> Result<Self> {
        let python = Python::new(config).map_err(|failure| StartError { name: "python".into(), failure })?;
        Ok(Self { python, form: config.images.unwrap_or_default(), records: records.to_vec() })
    }

    /// Score of each image: fp32 `[B]`, NaN if it is excluded or failed; and the failures.
    pub fn score(&self, painted: &Painted) -> Result<(Tensor, Vec<anyroll_reward::Error>)> {
        let labels = Vec::<i64>::try_from(painted.labels.f_to_device(Device::Cpu)?)?;
        let (values, shape) = pixels(&as_images(&painted.images)?)?;
        let is_video = is_video(&painted.images);
        let size = values.len() / labels.len().max(1);
        let (next, found) = (AtomicUsize::new(0), Mutex::new(vec![f32::NAN; labels.len()]));
        let failures = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..WORKERS.min(labels.len()) {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(&label) = labels.get(index) else { break };
                        let frames = values[index * size..][..size].chunks_exact(shape.iter().product());
                        let frames = frames.map(|frame| encoded(self.form, frame, shape)).collect();
                        let images = Images { frames, shape, is_video };
                        match self.python.score_images(&self.records[label as usize], &images) {
                            Ok(score) => lock(&found)[index] = score.map_or(f32::NAN, |score| score as f32),
                            Err(error) => lock(&failures).push(error),
                        }
                    }
                });
            }
        });
        let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let scores = Tensor::f_from_slice(&found)?.f_to_device(painted.images.device())?;
        Ok((scores, failures.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// An image of [`pixels`], -1 (black) to 1 (white), in the format of the function's process.
fn encoded(form: ImageForm, values: &[f32], shape: [usize; 3]) -> Vec<u8> {
    match form {
        ImageForm::Png => Picture::new(values, shape).png(),
        ImageForm::Uint8 => Picture::new(values, shape).pixels,
        ImageForm::Float32 => values.iter().flat_map(|value| unit(*value).to_ne_bytes()).collect(),
    }
}

/// Maps -1..1 to 0..1 and clamps; NaN stays NaN.
fn unit(value: f32) -> f32 {
    (value.clamp(-1.0, 1.0) + 1.0) / 2.0
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_has_the_same_pixels() {
        let values = [-1.0f32, 0.0, 1.0, 9.0, -0.5, 0.002];
        assert_eq!(encoded(ImageForm::Uint8, &values, [1, 2, 3]), [0, 128, 255, 255, 64, 128]);
        let floats = encoded(ImageForm::Float32, &values, [1, 2, 3]);
        let floats: Vec<f32> = floats.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
        assert_eq!(floats, [0.0, 0.5, 1.0, 1.0, 0.25, 0.501]);
        assert!(encoded(ImageForm::Png, &values, [1, 2, 3]).starts_with(b"\x89PNG"));
        assert_eq!(encoded(ImageForm::Uint8, &[f32::NAN], [1, 1, 1]), [0]);
        assert!(unit(f32::NAN).is_nan());
    }
}
