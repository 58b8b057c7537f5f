//! Images as PNG, alone or in grids.

use tch::{Device, Kind, Tensor};

use crate::Result;

/// A grey or coloured picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// In pixels.
    pub width: u32,
    /// In pixels.
    pub height: u32,
    /// Values of a pixel: 1 (grey) or 3 (red, green, blue).
    pub channels: u32,
    /// Row by row, 0 is black.
    pub pixels: Vec<u8>,
}

/// Tiny images are enlarged to sides of at most this many pixels.
const SMALLEST: usize = 48;
/// Large images are reduced to sides of at most this many pixels.
const LARGEST: usize = 192;
/// Pixels between images, and around them.
const GAP: usize = 4;
/// Grey level between images.
const BACKGROUND: u8 = 128;

/// A grid of images of one size, in rows of `columns`. Tiny images are enlarged and large ones reduced.
pub fn grid(images: &[Picture], columns: usize) -> Picture {
    let Some(Picture { width, height, channels, .. }) = images.first() else {
        return Picture { width: 0, height: 0, channels: 1, pixels: Vec::new() };
    };
    let (own_width, own_height, channels) = (*width as usize, *height as usize, *channels as usize);
    let longest = own_width.max(own_height);
    let (zoom, shrink) = ((SMALLEST / longest).max(1), longest.div_ceil(LARGEST));
    let (shown_width, shown_height) = (own_width * zoom / shrink, own_height * zoom / shrink);
    let rows = images.len().div_ceil(columns.max(1));
    let width = GAP + columns * (shown_width + GAP);
    let height = GAP + rows * (shown_height + GAP);
    let mut pixels = vec![BACKGROUND; width * height * channels];
    for (index, image) in images.iter().enumerate() {
        let top = GAP + index / columns * (shown_height + GAP);
        let left = GAP + index % columns * (shown_width + GAP);
        for (y, x) in (0..shown_height).flat_map(|y| (0..shown_width).map(move |x| (y, x))) {
            let to = ((top + y) * width + left + x) * channels;
            let from = (y * shrink / zoom * own_width + x * shrink / zoom) * channels;
            pixels[to..to + channels].copy_from_slice(&image.pixels[from..from + channels]);
        }
    }
    Picture { width: width as u32, height: height as u32, channels: channels as u32, pixels }
}

/// Values of images `[B, channels, height, width]` on the host as fp32 `[B, height, width, channels]`, and
/// the sizes `[height, width, channels]`. If there are not 3 channels, only the first is kept.
pub fn pixels(images: &Tensor) -> Result<(Vec<f32>, [usize; 3])> {
    let &[_, channels, height, width] = &images.size()[..] else {
        unreachable!("images have four dimensions")
    };
    let channels = if channels == 3 { 3 } else { 1 };
    let shown = images.f_narrow(1, 0, channels)?.f_permute([0, 2, 3, 1])?.f_to_kind(Kind::Float)?;
    let values = Vec::<f32>::try_from(shown.f_to_device(Device::Cpu)?.f_flatten(0, -1)?)?;
    Ok((values, [height, width, channels].map(|size| size as usize)))
}

impl Picture {
    /// One picture per image of `[B, channels, height, width]`.
    pub fn of_images(images: &Tensor) -> Result<Vec<Picture>> {
        let (values, shape) = pixels(images)?;
        let size = shape.iter().product::<usize>().max(1);
        Ok(values.chunks_exact(size).map(|image| Picture::new(image, shape)).collect())
    }

    /// A picture of [`pixels`] of one image, from -1 (black) to 1 (white); NaN is black.
    pub fn new(values: &[f32], [height, width, channels]: [usize; 3]) -> Picture {
        Picture {
            width: width as u32,
            height: height as u32,
            channels: channels as u32,
            pixels: values.iter().map(|&value| byte(value)).collect(),
        }
    }

    /// Encodes the picture as a PNG file.
    pub fn png(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width, self.height);
        encoder.set_color(if self.channels == 3 { png::ColorType::Rgb } else { png::ColorType::Grayscale });
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().expect("memory takes any header");
        writer.write_image_data(&self.pixels).expect("there are as many pixels as the header says");
        writer.finish().expect("memory takes any end");
        bytes
    }
}

/// Maps NaN to black.
fn byte(value: f32) -> u8 {
    ((value.clamp(-1.0, 1.0) + 1.0) * 127.5).round() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pixels_of(picture: &Picture) -> Vec<u8> {
        let decoder = png::Decoder::new(std::io::Cursor::new(picture.png()));
        let mut reader = decoder.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (picture.width, picture.height));
        pixels
    }

    #[test]
    fn a_grid_reads_back_as_it_was_drawn() {
        let values = [-1.0, 0.0, 1.0, 9.0, f32::NAN, f32::NAN, f32::NAN, f32::NAN, 0.2, 0.2, 0.2, 0.2];
        let images = Picture::of_images(&Tensor::from_slice(&values).view([3, 1, 2, 2])).unwrap();
        let picture = grid(&images, 2);
        assert_eq!((picture.width, picture.height), (4 + 2 * 52, 4 + 2 * 52));
        assert_eq!(pixels_of(&picture), picture.pixels);
        let at = |y: u32, x: u32| picture.pixels[(y * picture.width + x) as usize];
        assert_eq!([at(0, 0), at(4, 4), at(9, 51), at(51, 4), at(51, 51)], [128, 0, 128, 255, 255]);
        assert_eq!([at(5, 53), at(20, 56), at(61, 9)], [128, 0, 153]);
    }

    #[test]
    fn colours_stay_and_large_images_shrink() {
        let values: Vec<f32> = (0..3).flat_map(|channel| vec![channel as f32 - 1.0; 400 * 200]).collect();
        let images = Picture::of_images(&Tensor::from_slice(&values).view([1, 3, 200, 400])).unwrap();
        assert_eq!(images[0].pixels[..6], [0, 128, 255, 0, 128, 255]);
        assert_eq!(pixels_of(&images[0]), images[0].pixels);
        let picture = grid(&images, 1);
        assert_eq!((picture.width, picture.height, picture.channels), (4 + 133 + 4, 4 + 66 + 4, 3));
        let middle = (20 * picture.width + 20) as usize * 3;
        assert_eq!(picture.pixels[middle..middle + 3], [0, 128, 255]);
    }
}
