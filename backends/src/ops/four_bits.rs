//! Values in 4 bits: NF4 (Dettmers et al. 2023, "QLoRA"), in blocks of 64 as bitsandbytes has them.
//!
//! A block is divided by its largest absolute value, and each quotient becomes the nearest of 16 levels, the quantiles of a
//! normal distribution. The largest value stays in fp32, so that a value takes 4.5 bits. A block is a row of bytes, `[36]`:
//! 32 with two codes each, the first in the upper half, and the bytes of the largest value.

use tch::{Kind, Tensor};

use super::Result;
use super::check::{Args, Engine};
use crate::kernels;

/// Values of a block.
pub const FOUR_BIT_BLOCK: i64 = 64;
/// Bytes of a block.
pub const FOUR_BIT_BLOCK_BYTES: i64 = CODE_BYTES + size_of::<f32>() as i64;
const CODE_BYTES: i64 = FOUR_BIT_BLOCK / 2;
/// Blocks that are converted at a time.
const CHUNK: i64 = 1 << 18;
/// Largest values below this count as this one, so that zeros are divided by no zero.
const LEAST: f64 = 1e-38;

/// The levels, in ascending order (QLoRA, appendix E).
const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Writes floats `[N]` in 4 bits to `packed`, uint8 `[N / 64, 36]`: the nearest level of each, the lower one in between. N is a
/// multiple of [`FOUR_BIT_BLOCK`]. A block that holds a value which is no number has none in 4 bits.
///
/// # Errors
/// [`super::Error::Argument`] for shapes or dtypes that do not fit, or libtorch's error; the same below.
pub fn in_four_bits(values: &Tensor, packed: &mut Tensor) -> Result<()> {
    let blocks = blocks_of(Args::new("in_four_bits", values), values, packed)?;
    let levels = Tensor::f_from_slice(&LEVELS)?.f_to_device(values.device())?;
    let bounds = levels.f_narrow(0, 1, 15)?.f_add(&levels.f_narrow(0, 0, 15)?)?.f_div_scalar(2.0)?;
    for (of_values, of_packed) in chunks(values, packed, blocks)? {
        let wide = of_values.f_to_kind(Kind::Float)?;
        let largest = wide.f_abs()?.f_amax([1i64].as_slice(), true)?;
        let quotients = wide.f_mul(&largest.f_clamp_min(LEAST)?.f_reciprocal()?)?;
        let codes = quotients.f_bucketize(&bounds, true, false)?.f_to_kind(Kind::Uint8)?;
        let halves = codes.f_view([-1, CODE_BYTES, 2])?;
        let upper = halves.f_select(2, 0)?.f_mul_scalar(16i64)?;
        of_packed.f_narrow(1, 0, CODE_BYTES)?.f_copy_(&upper.f_add(&halves.f_select(2, 1)?)?)?;
        largest_of(&of_packed)?.f_copy_(&largest)?;
    }
    Ok(())
}

/// Writes what [`in_four_bits`] made to `values`, floats `[N]`, each rounded once from fp32.
pub fn from_four_bits(packed: &Tensor, values: &mut Tensor) -> Result<()> {
    let args = Args::new("from_four_bits", values);
    let blocks = blocks_of(args, values, packed)?;
    let is_aligned = values.data_ptr().addr().is_multiple_of(32);
    if let Some(Engine::Device(device)) = Engine::of(values).filter(|_| is_aligned)
        && kernels::four_bits::SOURCE.exists_on(&*device)
    {
        let to = args.values("values", values, &[blocks * FOUR_BIT_BLOCK])?;
        let from = args.dense("packed", packed, &[blocks, FOUR_BIT_BLOCK_BYTES], Kind::Uint8)?;
        // SAFETY: the sizes of both tensors were checked, `values` is borrowed mutably, and libtorch takes memory back in its
        // stream's order.
        return args.launched(unsafe {
            kernels::four_bits::widen(&*device, args.kind(), to, from.cast_const(), blocks)
        });
    }
    let levels = Tensor::f_from_slice(&LEVELS)?.f_to_device(values.device())?;
    for (of_values, of_packed) in chunks(values, packed, blocks)? {
        let codes = of_packed.f_narrow(1, 0, CODE_BYTES)?.f_to_kind(Kind::Int)?;
        let [upper, lower] = [codes.f_div_scalar_mode(16i64, "floor")?, codes.f_bitwise_and(15i64)?];
        let codes = Tensor::f_stack(&[upper, lower], 2)?.f_view([-1])?;
        let wide = levels.f_index_select(0, &codes)?.f_view([-1, FOUR_BIT_BLOCK])?;
        of_values.shallow_clone().f_copy_(&wide.f_mul(&largest_of(&of_packed)?)?)?;
    }
    Ok(())
}

/// Returns the largest absolute values of blocks, fp32 `[B, 1]`, as a view.
fn largest_of(packed: &Tensor) -> Result<Tensor> {
    Ok(packed.f_narrow(1, CODE_BYTES, size_of::<f32>() as i64)?.f_view_dtype(Kind::Float)?)
}

/// Returns the number of blocks, once it is that of both tensors.
fn blocks_of(args: Args, values: &Tensor, packed: &Tensor) -> Result<i64> {
    let [len] = args.dims("values", values)?;
    if len % FOUR_BIT_BLOCK != 0 {
        return Err(
            args.refuse("values", format!("has {len} elements, expected a multiple of {FOUR_BIT_BLOCK}"))
        );
    }
    let blocks = len / FOUR_BIT_BLOCK;
    args.dense("packed", packed, &[blocks, FOUR_BIT_BLOCK_BYTES], Kind::Uint8)?;
    Ok(blocks)
}

/// Returns views of some blocks at a time: of their values `[B, 64]` and their bytes `[B, 36]`.
fn chunks(values: &Tensor, packed: &Tensor, blocks: i64) -> Result<Vec<(Tensor, Tensor)>> {
    let values = values.f_view([blocks, FOUR_BIT_BLOCK])?;
    let of = |start: i64| -> Result<_> {
        let count = CHUNK.min(blocks - start);
        Ok((values.f_narrow(0, start, count)?, packed.f_narrow(0, start, count)?))
    };
    (0..blocks).step_by(CHUNK as usize).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::tests::*;

    fn packed_of(values: &Tensor) -> Tensor {
        let place = (Kind::Uint8, values.device());
        let mut packed = Tensor::zeros([values.numel() as i64 / FOUR_BIT_BLOCK, FOUR_BIT_BLOCK_BYTES], place);
        in_four_bits(values, &mut packed).unwrap();
        packed
    }

    fn doubles(of: &Tensor) -> Vec<f64> {
        Vec::try_from(of.to_kind(Kind::Double).view([-1])).unwrap()
    }

    /// Level `index` of a table with `2 * halves` levels: the quantile of the normal distribution that QLoRA's formula
    /// takes, divided by the largest. `inverse` is the inverse of its distribution function.
    fn quantile(index: usize, inverse: impl Fn(f64) -> f64) -> f64 {
        const OFFSET: f64 = 0.967_708_3;
        let largest = inverse(OFFSET);
        // Eight steps below zero and nine above, which share zero.
        let step = |of: usize, steps: usize| OFFSET + (0.5 - OFFSET) * of as f64 / (steps - 1) as f64;
        match index {
            0..=7 => -inverse(step(index, 8)) / largest,
            _ => inverse(step(15 - index, 9)) / largest,
        }
    }

    #[test]
    fn levels_are_quantiles_of_the_normal_distribution() {
        let inverse = |share: f64| {
            let argument = Tensor::from_slice(&[2.0 * share - 1.0]);
            2f64.sqrt() * argument.erfinv().double_value(&[0])
        };
        for (index, &level) in LEVELS.iter().enumerate() {
            let expected = quantile(index, inverse);
            assert!((f64::from(level) - expected).abs() < 2e-6, "{index}: {level}, not {expected}");
        }
    }

    /// By arithmetic on fp64: the nearest level of each value's quotient.
    #[test]
    fn values_are_the_nearest_levels() {
        for &place in PLACES.iter() {
            let spread = Tensor::logspace(-3, 3, 40, 10.0, (Kind::Float, place.1)).to_kind(place.0);
            let matrix = random(&[40, FOUR_BIT_BLOCK], place) * spread.unsqueeze(1);
            let values = Tensor::cat(&[matrix, random(&[1, FOUR_BIT_BLOCK], place) * 0.0], 0).view([-1]);
            let mut found = values.zeros_like();
            from_four_bits(&packed_of(&values), &mut found).unwrap();
            let (given, found) = (doubles(&values), doubles(&found));
            let blocks = given.chunks(FOUR_BIT_BLOCK as usize).zip(found.chunks(FOUR_BIT_BLOCK as usize));
            for (block, (given, found)) in blocks.enumerate() {
                let largest = given.iter().fold(0f64, |largest, value| largest.max(value.abs()));
                for (&given, &found) in given.iter().zip(found) {
                    let errors = LEVELS.map(|level| (f64::from(level) * largest - given).abs());
                    let least = errors.into_iter().fold(f64::INFINITY, f64::min);
                    // A tie in fp32 may go either way; bf16 rounds the result.
                    let rounding = largest * if place.0 == Kind::Float { 1e-6 } else { 4e-3 };
                    let error = (found - given).abs();
                    assert!(error <= least + rounding, "{given} is {found} in block {block}, {place:?}");
                }
            }
        }
    }

    /// bitsandbytes' result for a block by hand: its largest value, both halves of a byte, and a value between two levels.
    #[test]
    fn bytes_are_those_of_bitsandbytes() {
        let mut values = [0f32; 64];
        values[..6].copy_from_slice(&[2.0, -2.0, 1.0, -0.5, 0.079_580_3, 0.08]);
        let packed: Vec<u8> = Vec::try_from(packed_of(&Tensor::from_slice(&values)).view([-1])).unwrap();
        // 1/2 is nearest .4407 (12), -1/4 nearest -.2844 (4), .0398 the bound between 0 and .0796 (7), .04 above it (8).
        assert_eq!(packed[..4], [0xf0, 0xc4, 0x78, 0x77]);
        assert!(packed[4..32].iter().all(|&byte| byte == 0x77));
        assert_eq!(packed[32..], 2f32.to_le_bytes());
    }

    /// By PyTorch: `(A * (1 / absmax))[:, :, None] - code).abs().argmin(-1)`, two codes a byte, for all 16 codes.
    const GOLDEN: [&str; 2] = [
        "02ee2e074911612b7b21712a59103ff513dcf99fcd315ff30195a21712b7b216",
        "119470e2ee201a7d44c690e1cb0cd202ed1de202dbfab0ef75b33b580e1cc0de",
    ];

    /// Bytes are also the same on each device, and so are the bits of what is widened from them.
    #[test]
    fn bytes_are_those_of_pytorch_on_each_device() {
        let values: Vec<f32> = (0..128).map(|i| ((i * i * 37 + i * 11) % 199 - 99) as f32 / 64.0).collect();
        for &(kind, device) in PLACES.iter() {
            let packed = packed_of(&Tensor::from_slice(&values).to_kind(kind).to_device(device));
            let rows: Vec<Vec<u8>> = Vec::try_from(packed.to_device(tch::Device::Cpu)).unwrap();
            for (row, golden) in rows.iter().zip(GOLDEN) {
                let codes: String = row[..32].iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(
                    (&*codes, &row[32..]),
                    (golden, &1.546_875f32.to_le_bytes()[..]),
                    "{kind:?}, {device:?}"
                );
            }
            let widened = |packed: Tensor| {
                let mut values = Tensor::zeros([128], (kind, packed.device()));
                from_four_bits(&packed, &mut values).unwrap();
                values.to_device(tch::Device::Cpu)
            };
            let same = widened(packed.copy()).equal(&widened(packed.to_device(tch::Device::Cpu)));
            assert!(same, "{kind:?}, {device:?}");
        }
    }

    /// Frozen weights are read from a checkpoint or another strategy as they were widened.
    #[test]
    fn widened_values_have_the_same_bytes() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let packed = packed_of(&random(&[40 * FOUR_BIT_BLOCK], (kind, tch::Device::Cpu)));
            let mut values = Tensor::zeros([40 * FOUR_BIT_BLOCK], (kind, tch::Device::Cpu));
            from_four_bits(&packed, &mut values).unwrap();
            assert!(packed_of(&values).equal(&packed), "{kind:?}");
        }
    }

    #[test]
    fn what_is_no_number_stays_none_and_other_blocks_are_as_they_were() {
        let values = random(&[3, 64], (Kind::Float, tch::Device::Cpu));
        let _ = values.get(0).narrow(0, 3, 1).fill_(f64::NAN);
        let _ = values.get(1).narrow(0, 5, 1).fill_(f64::INFINITY);
        let mut wide = values.view([-1]).zeros_like();
        from_four_bits(&packed_of(&values.view([-1])), &mut wide).unwrap();
        let wide = wide.view([3, 64]);
        let is_none = |row: i64| bool::try_from(wide.get(row).isnan().any()).unwrap();
        assert_eq!([0, 1, 2].map(is_none), [true, true, false]);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let at = (Kind::Float, tch::Device::Cpu);
        let refused = |len: i64, blocks: i64| {
            let mut packed = Tensor::zeros([blocks, FOUR_BIT_BLOCK_BYTES], (Kind::Uint8, at.1));
            in_four_bits(&random(&[len], at), &mut packed).unwrap_err().to_string()
        };
        assert!(refused(96, 1).contains("multiple of 64"));
        assert!(refused(128, 1).contains("packed"));
    }
}
