//! Synthetic images: a light square or diamond on black, in the quadrant that is its class.

use anyroll_config::ImageDataConfig;
use anyroll_data::{Record, stream};
use rand_chacha::{ChaCha8Rng, rand_core::Rng};
use tch::{Device, Kind, Tensor};

use super::noise::Purpose;
use crate::Result;

/// Height and width of an image; it has one channel, of -1 (black) to 1.
pub const SIZE: usize = ImageDataConfig::SHAPES_SIZE;
/// The quadrants, in rows.
pub const CLASSES: usize = ImageDataConfig::SHAPES_CLASSES;
const NAMES: [&str; CLASSES] = ["top left", "top right", "bottom left", "bottom right"];

/// Images of a warm-up step, over all ranks: fp32 `[count, 1, SIZE, SIZE]`, with the class of each.
pub fn train_batch(seed: u64, step: u64, count: usize, device: Device) -> Result<(Tensor, Vec<i64>)> {
    let mut random = stream(Purpose::WarmupImages as u64, seed, step);
    let (mut pixels, mut labels) = (Vec::with_capacity(count * SIZE * SIZE), Vec::with_capacity(count));
    for _ in 0..count {
        let label = below(&mut random, CLASSES);
        draw(&mut random, label, &mut pixels);
        labels.push(label as i64);
    }
    let size = SIZE as i64;
    Ok((Tensor::f_from_slice(&pixels)?.f_view([-1, 1, size, size])?.f_to_device(device)?, labels))
}

/// Labels of a step's prompts, below `labels`, over all ranks.
pub fn prompts(seed: u64, step: u64, count: usize, labels: usize) -> Vec<i64> {
    let mut random = stream(Purpose::Prompts as u64, seed, step);
    (0..count).map(|_| below(&mut random, labels) as i64).collect()
}

/// Record of each class: its name as the prompt, and its index in a column `label`.
pub fn records() -> Vec<Record> {
    let record = |(label, name): (usize, &&str)| Record {
        id: (*name).to_owned(),
        prompt: (*name).to_owned(),
        columns: [("label".to_owned(), label.into())].into_iter().collect(),
        ..Record::default()
    };
    NAMES.iter().enumerate().map(record).collect()
}

/// Mask of each class's quadrant, 1 inside and 0 outside: fp32 `[CLASSES, SIZE, SIZE]`.
pub fn quadrants(device: Device) -> Result<Tensor> {
    let half = SIZE / 2;
    let mut values = Vec::with_capacity(CLASSES * SIZE * SIZE);
    for class in 0..CLASSES {
        for y in 0..SIZE {
            for x in 0..SIZE {
                let within = (y / half, x / half) == (class / 2, class % 2);
                values.push(f32::from(u8::from(within)));
            }
        }
    }
    let (classes, size) = (CLASSES as i64, SIZE as i64);
    Ok(Tensor::f_from_slice(&values)?
        .f_view([classes, size, size])?
        .f_to_device(device)?
        .f_to_kind(Kind::Float)?)
}

/// Appends the pixels of one image, with its shape up to a pixel off the middle of its quadrant.
fn draw(random: &mut ChaCha8Rng, label: usize, pixels: &mut Vec<f32>) {
    let mut centre = |side: usize| [2, 5][side] as i64 + below(random, 3) as i64 - 1;
    let (y0, x0) = (centre(label / 2), centre(label % 2));
    let radius = 1 + below(random, 2) as i64;
    let is_square = below(random, 2) == 0;
    let brightness = 0.3 + 0.7 * uniform(random);
    for y in 0..SIZE as i64 {
        for x in 0..SIZE as i64 {
            let (dy, dx) = ((y - y0).abs(), (x - x0).abs());
            let distance = if is_square { dy.max(dx) } else { dy + dx };
            pixels.push(if distance <= radius { brightness } else { -1.0 });
        }
    }
}

fn below(random: &mut ChaCha8Rng, limit: usize) -> usize {
    (random.next_u64() % limit as u64) as usize // limits are tiny, so the bias is negligible
}

fn uniform(random: &mut ChaCha8Rng) -> f32 {
    (random.next_u32() >> 8) as f32 / (1 << 24) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_lie_in_their_quadrants_and_vary() {
        let (images, labels) = train_batch(0, 0, 400, Device::Cpu).unwrap();
        let quadrants = quadrants(Device::Cpu).unwrap();
        assert_eq!(quadrants.sum(Kind::Float).double_value(&[]), 64.0);
        let light = (images.squeeze_dim(1) + 1.0) / 2.0;
        let own = quadrants.index_select(0, &Tensor::from_slice(&labels));
        let inside = (&light * own).sum_dim_intlist([1, 2].as_slice(), false, Kind::Float);
        let all = light.sum_dim_intlist([1, 2].as_slice(), false, Kind::Float);
        assert!(inside.divide(&all).min().double_value(&[]) > 0.35);
        assert!((0..4).all(|label| labels.iter().filter(|&&found| found == label).count() > 60));
        assert!(all.std(true).double_value(&[]) > 1.0);
        assert_ne!(images, train_batch(0, 1, 400, Device::Cpu).unwrap().0);
    }
}
