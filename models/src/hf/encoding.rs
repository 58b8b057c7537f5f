//! Encodings of a tensor's values in files: those of safetensors, and the quantized blocks of GGUF.

use half::{bf16, f16};
use safetensors::Dtype;

/// Encoding of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    F32,
    F16,
    Bf16,
    /// 32 values: 4 bits times a scale.
    Q4_0,
    /// 32 values: 4 bits times a scale, and an offset.
    Q4_1,
    /// 32 values: 5 bits times a scale.
    Q5_0,
    /// 32 values: 5 bits times a scale, and an offset.
    Q5_1,
    /// 32 values: 8 bits times a scale.
    Q8_0,
    /// 256 values: 4 bits, with scales and offsets of 32 values in 6 bits.
    Q4K,
    /// 256 values: 5 bits, with scales and offsets of 32 values in 6 bits.
    Q5K,
    /// 256 values: 6 bits, with scales of 16 values in 8 bits.
    Q6K,
    /// Any other, whose values cannot be read.
    Unread(Dtype),
}

/// Most values of a block.
const MOST_VALUES: usize = 256;

impl Encoding {
    /// Returns the encoding of a safetensors file's dtype.
    pub fn of_safetensors(dtype: Dtype) -> Encoding {
        match dtype {
            Dtype::F32 => Encoding::F32,
            Dtype::F16 => Encoding::F16,
            Dtype::BF16 => Encoding::Bf16,
            other => Encoding::Unread(other),
        }
    }

    /// Returns the encoding with this number in GGUF's list of types; `None` for one that is not read.
    pub fn of_gguf(number: u32) -> Option<Encoding> {
        Some(match number {
            0 => Encoding::F32,
            1 => Encoding::F16,
            2 => Encoding::Q4_0,
            3 => Encoding::Q4_1,
            6 => Encoding::Q5_0,
            7 => Encoding::Q5_1,
            8 => Encoding::Q8_0,
            12 => Encoding::Q4K,
            13 => Encoding::Q5K,
            14 => Encoding::Q6K,
            30 => Encoding::Bf16,
            _ => return None,
        })
    }

    /// Returns the values and the bytes of a block; `None` if values cannot be read.
    pub fn block(self) -> Option<(usize, usize)> {
        Some(match self {
            Encoding::F32 => (1, 4),
            Encoding::F16 | Encoding::Bf16 => (1, 2),
            Encoding::Q4_0 => (32, 18),
            Encoding::Q4_1 => (32, 20),
            Encoding::Q5_0 => (32, 22),
            Encoding::Q5_1 => (32, 24),
            Encoding::Q8_0 => (32, 34),
            Encoding::Q4K => (256, 144),
            Encoding::Q5K => (256, 176),
            Encoding::Q6K => (256, 210),
            Encoding::Unread(_) => return None,
        })
    }

    /// Returns true if values are rounded to fewer than 16 bits.
    pub fn is_quantized(self) -> bool {
        self.block().is_some_and(|(values, _)| values > 1)
    }

    /// Decodes the blocks `bytes` into `values`, without the first `skip` values of the first block. The last
    /// block may have more values.
    pub fn decode(self, bytes: &[u8], skip: usize, values: &mut [f32]) {
        match self {
            Encoding::F32 => return decode_plain(bytes, values, f32::from_le_bytes),
            Encoding::F16 => return decode_plain(bytes, values, |it| f16::from_le_bytes(it).to_f32()),
            Encoding::Bf16 => return decode_plain(bytes, values, |it| bf16::from_le_bytes(it).to_f32()),
            _ => {}
        }
        let (count, width) = self.block().expect("checked when the file was opened");
        let mut block = [0.0; MOST_VALUES];
        let (mut rest, mut skip) = (values, skip);
        for bytes in bytes.chunks_exact(width) {
            self.decode_block(bytes, &mut block[..count]);
            let taken = (count - skip).min(rest.len());
            let (now, later) = rest.split_at_mut(taken);
            now.copy_from_slice(&block[skip..skip + taken]);
            (rest, skip) = (later, 0);
        }
    }

    /// Decodes one quantized block. Products and sums round as in llama.cpp's Python package.
    fn decode_block(self, bytes: &[u8], values: &mut [f32]) {
        let scale = half_at(bytes, 0);
        match self {
            Encoding::Q4_0 => halves(&bytes[2..], [0; 4], values, |q| scale * (q - 8.0)),
            Encoding::Q4_1 => {
                let offset = half_at(bytes, 2);
                halves(&bytes[4..], [0; 4], values, |q| scale * q + offset);
            }
            Encoding::Q5_0 => {
                let high = [bytes[2], bytes[3], bytes[4], bytes[5]];
                halves(&bytes[6..], high, values, |q| scale * (q - 16.0));
            }
            Encoding::Q5_1 => {
                let (offset, high) = (half_at(bytes, 2), [bytes[4], bytes[5], bytes[6], bytes[7]]);
                halves(&bytes[8..], high, values, |q| scale * q + offset);
            }
            Encoding::Q8_0 => {
                for (value, byte) in values.iter_mut().zip(&bytes[2..]) {
                    *value = f32::from(byte.cast_signed()) * scale;
                }
            }
            Encoding::Q4K => with_offsets(bytes, None, &bytes[16..], values),
            Encoding::Q5K => with_offsets(bytes, Some(&bytes[16..48]), &bytes[48..], values),
            Encoding::Q6K => six_bits(bytes, values),
            Encoding::F32 | Encoding::F16 | Encoding::Bf16 | Encoding::Unread(_) => {
                unreachable!("decoded above, or refused when the file was opened")
            }
        }
    }
}

fn decode_plain<const WIDTH: usize>(bytes: &[u8], values: &mut [f32], decode: impl Fn([u8; WIDTH]) -> f32) {
    let (bytes, _) = bytes.as_chunks::<WIDTH>();
    for (value, bytes) in values.iter_mut().zip(bytes) {
        *value = decode(*bytes);
    }
}

/// Returns the fp16 value at `at`.
fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Decodes 32 values. The low half of the 16 bytes of `low` are the first 16 values' low bits; `high` has a fifth
/// bit for each value.
fn halves(low: &[u8], high: [u8; 4], values: &mut [f32], decode: impl Fn(f32) -> f32) {
    let high = u32::from_le_bytes(high);
    for (index, value) in values.iter_mut().enumerate() {
        let byte = low[index % 16];
        let bits = if index < 16 { byte & 15 } else { byte >> 4 };
        let fifth = ((high >> index) & 1) as u8;
        *value = decode(f32::from(bits | (fifth << 4)));
    }
}

/// Decodes 256 values as eight parts of 32, each with a scale and an offset: `Q4_K`, and `Q5_K` with a fifth bit in
/// `high`.
fn with_offsets(bytes: &[u8], high: Option<&[u8]>, low: &[u8], values: &mut [f32]) {
    let (scale, offset) = (half_at(bytes, 0), half_at(bytes, 2));
    for (part, values) in values.chunks_exact_mut(32).enumerate() {
        let (own_scale, own_offset) = scale_and_offset(&bytes[4..16], part);
        let (scale, offset) = (scale * f32::from(own_scale), offset * f32::from(own_offset));
        for (index, value) in values.iter_mut().enumerate() {
            let byte = low[part / 2 * 32 + index];
            let bits = if part % 2 == 0 { byte & 15 } else { byte >> 4 };
            let fifth = high.map_or(0, |high| (high[index] >> part) & 1);
            *value = scale * f32::from(bits | (fifth << 4)) - offset;
        }
    }
}

/// Returns the 6-bit scale and offset of one of eight parts, which 12 bytes hold.
fn scale_and_offset(packed: &[u8], part: usize) -> (u8, u8) {
    match part {
        0..4 => (packed[part] & 63, packed[part + 4] & 63),
        _ => {
            let (rest, scale, offset) = (packed[part + 4], packed[part - 4], packed[part]);
            ((rest & 15) | ((scale >> 6) << 4), (rest >> 4) | ((offset >> 6) << 4))
        }
    }
}

/// Decodes 256 values of `Q6_K`: 4 low bits, 2 high bits, and a scale for 16 values.
fn six_bits(bytes: &[u8], values: &mut [f32]) {
    let (low, high, scales, scale) = (&bytes[..128], &bytes[128..192], &bytes[192..208], half_at(bytes, 208));
    for (index, value) in values.iter_mut().enumerate() {
        // Of 128 values, the first 64 have the low half of 64 bytes, and each 32 have other bits of 32 bytes.
        let (whole, within) = (index / 128, index % 128);
        let byte = low[whole * 64 + within % 64];
        let bits = if within < 64 { byte & 15 } else { byte >> 4 };
        let two = (high[whole * 32 + within % 32] >> (within / 32 * 2)) & 3;
        let scale = scale * f32::from(scales[index / 16].cast_signed());
        *value = scale * (f32::from(bits | (two << 4)) - 32.0);
    }
}
