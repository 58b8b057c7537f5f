//! Grids of small grey images, as PNG.

/// A grey picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// In pixels.
    pub width: u32,
    /// In pixels.
    pub height: u32,
    /// Row by row, 0 is black.
    pub pixels: Vec<u8>,
}

/// Screen pixels of an image's pixel, each way: the images are tiny.
const ZOOM: usize = 6;
/// Pixels between images, and around them.
const GAP: usize = 4;
/// The grey between them.
const BACKGROUND: u8 = 128;

/// Square images of `size` x `size` values, -1 (black) to 1 (white), in rows of `columns`.
pub fn grid(images: &[&[f32]], columns: usize, size: usize) -> Picture {
    let cell = size * ZOOM + GAP;
    let (width, height) = (GAP + columns * cell, GAP + images.len().div_ceil(columns.max(1)) * cell);
    let mut pixels = vec![BACKGROUND; width * height];
    for (index, image) in images.iter().enumerate() {
        let (top, left) = (GAP + index / columns * cell, GAP + index % columns * cell);
        for (y, x) in (0..size * ZOOM).flat_map(|y| (0..size * ZOOM).map(move |x| (y, x))) {
            let value = image[y / ZOOM * size + x / ZOOM];
            pixels[(top + y) * width + left + x] = grey(value);
        }
    }
    Picture { width: width as u32, height: height as u32, pixels }
}

impl Picture {
    /// As a PNG file.
    pub fn png(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width, self.height);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().expect("memory takes any header");
        writer.write_image_data(&self.pixels).expect("there are as many pixels as the header says");
        writer.finish().expect("memory takes any end");
        bytes
    }
}

/// What is no number is black.
fn grey(value: f32) -> u8 {
    ((value.clamp(-1.0, 1.0) + 1.0) * 127.5).round() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_reads_back_as_it_was_drawn() {
        let images: [&[f32]; 3] = [&[-1.0, 0.0, 1.0, 9.0], &[f32::NAN; 4], &[0.2; 4]];
        let picture = grid(&images, 2, 2);
        let decoder = png::Decoder::new(std::io::Cursor::new(picture.png()));
        let mut reader = decoder.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (4 + 2 * 16, 4 + 2 * 16));
        assert_eq!(pixels, picture.pixels);
        let at = |y: usize, x: usize| pixels[y * info.width as usize + x];
        assert_eq!([at(0, 0), at(4, 4), at(9, 15), at(10, 4), at(15, 15)], [128, 0, 128, 255, 255]);
        assert_eq!([at(5, 21), at(20, 20), at(25, 9), at(35, 35)], [0, 128, 153, 128]);
    }
}
