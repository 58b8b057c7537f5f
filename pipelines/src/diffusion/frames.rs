//! Frames of videos `[B, channels, frames, height, width]`; an image `[B, channels, height, width]` is one.

use tch::{Kind, Tensor};

use crate::Result;

/// Returns true for videos, false for images.
pub fn is_video(images: &Tensor) -> bool {
    images.dim() == 5
}

/// `count` frames of each video, evenly spaced and including the first and the last; a single one is the
/// middle frame. All frames if there are no more. Images are unchanged.
pub fn evenly_spaced(images: &Tensor, count: usize) -> Result<Tensor> {
    if !is_video(images) {
        return Ok(images.shallow_clone());
    }
    let frames = images.size()[2] as usize;
    let count = count.min(frames);
    let number = |index: usize| match count {
        1 => (frames - 1) / 2,
        // Rounded to the nearest.
        _ => (2 * index * (frames - 1) + count - 1) / (2 * (count - 1)),
    };
    let numbers: Vec<i64> = (0..count).map(|index| number(index) as i64).collect();
    Ok(images.f_index_select(2, &Tensor::f_from_slice(&numbers)?.f_to_device(images.device())?)?)
}

/// Frames as images, `[B * frames, channels, height, width]`; frames of a video are adjacent.
pub fn as_images(images: &Tensor) -> Result<Tensor> {
    if is_video(images) { Ok(images.f_transpose(1, 2)?.f_flatten(0, 1)?) } else { Ok(images.shallow_clone()) }
}

/// Mean of `score` over the frames of each video, fp32 `[B]`. `score` maps images and labels to `[B *
/// frames]`.
pub fn mean_score(
    images: &Tensor,
    labels: &Tensor,
    score: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if !is_video(images) {
        return score(images, labels);
    }
    let frames = images.size()[2];
    let of_frames = score(&as_images(images)?, &labels.f_repeat_interleave_self_int(frames, 0, None)?)?;
    Ok(of_frames.f_view([-1, frames])?.f_mean_dim([1i64].as_slice(), false, Kind::Float)?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Videos of one pixel, whose values are the frame indices, plus 100 in the second video.
    fn videos(frames: i64) -> Tensor {
        let first = Tensor::arange(frames, (Kind::Float, Device::Cpu));
        Tensor::stack(&[&first, &(&first + 100.0)], 0).view([2, 1, frames, 1, 1])
    }

    #[test]
    fn frames_are_evenly_spaced_from_the_first_to_the_last() {
        let check = |frames: i64, count: usize, expected: &[f32]| {
            let found = evenly_spaced(&videos(frames), count).unwrap();
            assert_eq!(Vec::<f32>::try_from(found.select(0, 0).flatten(0, -1)).unwrap(), expected);
            assert_eq!(found.size()[0], 2);
        };
        check(5, 3, &[0.0, 2.0, 4.0]);
        check(5, 1, &[2.0]);
        check(5, 9, &[0.0, 1.0, 2.0, 3.0, 4.0]);
        check(81, 8, &[0.0, 11.0, 23.0, 34.0, 46.0, 57.0, 69.0, 80.0]);
        check(1, 2, &[0.0]);
        let images = Tensor::zeros([2, 3, 4, 4], (Kind::Float, Device::Cpu));
        assert_eq!(evenly_spaced(&images, 1).unwrap().size(), [2, 3, 4, 4]);
    }

    #[test]
    fn a_video_has_the_mean_score_of_its_frames() {
        let labels = Tensor::from_slice(&[3i64, 7]);
        let score = |images: &Tensor, labels: &Tensor| {
            assert_eq!(images.size(), [6, 1, 1, 1]);
            Ok(images.flatten(0, -1) * 2.0 + labels)
        };
        let found = mean_score(&videos(3), &labels, score).unwrap();
        assert_eq!(Vec::<f32>::try_from(found).unwrap(), [2.0 + 3.0, 202.0 + 7.0]);
    }
}
