//! Data: what ranks put in, and what must come out. All of it on the host, in bytes, by plain loops.

use anyroll_backends::{DType, ReduceOp};
use half::{bf16, f16};

use crate::runner::{Verdict, ensure, same, same_bytes};

/// `len` elements from a seeded sequence. Floats lie in [-1, 1), with all their bits in use and of sizes that differ
/// up to 128 times, so that the order of a sum shows; integers use their whole range, so that sums wrap.
pub(crate) fn random(dtype: DType, len: usize, seed: u64) -> Vec<u8> {
    let mut state = mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
    let mut bytes = Vec::with_capacity(len * dtype.size_bytes());
    for _ in 0..len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let draw = mix(state);
        let real = ((draw >> 40) as f32 / (1u32 << 23) as f32 - 1.0) / (1u32 << (draw % 8)) as f32;
        match dtype {
            DType::F32 => bytes.extend(real.to_ne_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f32(real).to_ne_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(real).to_ne_bytes()),
            DType::I32 | DType::I64 | DType::U8 => bytes.extend(&draw.to_ne_bytes()[..dtype.size_bytes()]),
        }
    }
    bytes
}

/// The reduction of `inputs`, in their order. Floats accumulate in fp32 and are rounded once; integers wrap.
pub(crate) fn reduce(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let count = inputs.len() as f32;
    let scaled = |sum: f32| if op == ReduceOp::Avg { sum / count } else { sum };
    let floats = |a: f32, b: f32| match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
    };
    let integers = |a: i64, b: i64| match op {
        ReduceOp::Sum | ReduceOp::Avg => a.wrapping_add(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
    };
    match dtype {
        DType::F32 => fold(inputs, f32::from_ne_bytes, floats, |x| scaled(x).to_ne_bytes()),
        DType::Bf16 => fold(
            inputs,
            |b| bf16::from_ne_bytes(b).to_f32(),
            floats,
            |x| bf16::from_f32(scaled(x)).to_ne_bytes(),
        ),
        DType::F16 => fold(
            inputs,
            |b| f16::from_ne_bytes(b).to_f32(),
            floats,
            |x| f16::from_f32(scaled(x)).to_ne_bytes(),
        ),
        DType::I32 => fold(inputs, |b| i32::from_ne_bytes(b).into(), integers, |x| (x as i32).to_ne_bytes()),
        DType::I64 => fold(inputs, i64::from_ne_bytes, integers, i64::to_ne_bytes),
        DType::U8 => fold(inputs, |b| u8::from_ne_bytes(b).into(), integers, |x| (x as u8).to_ne_bytes()),
    }
}

/// Fails unless `got` is the reduction of `inputs`: to the bit if `exact`, else within the rounding of a sum of
/// floats in any order.
pub(crate) fn same_reduction(
    what: &str,
    got: &[u8],
    (dtype, op, inputs): (DType, ReduceOp, &[Vec<u8>]),
    exact: bool,
) -> Verdict {
    let want = reduce(dtype, op, inputs);
    let is_sum = matches!(op, ReduceOp::Sum | ReduceOp::Avg);
    if exact || !is_sum || !dtype.is_float() {
        return same_bytes(what, got, &want);
    }
    same(&format!("{what}: length in bytes"), got.len(), want.len())?;
    // Every partial sum is below the number of ranks, and there are as many roundings.
    let half_ulp = match dtype {
        DType::Bf16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => f32::EPSILON / 2.0,
    };
    let ranks = inputs.len() as f32;
    let bound = half_ulp * ranks * ranks;
    for (index, (got, want)) in to_f32(dtype, got).into_iter().zip(to_f32(dtype, &want)).enumerate() {
        ensure!((got - want).abs() <= bound, "{what}: element {index} is {got}, want {want} +- {bound}");
    }
    Ok(())
}

/// FNV-1a: the ranks compare this instead of megabytes.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Joins the elements at one place of all inputs, for every place.
fn fold<const SIZE: usize, W: Copy>(
    inputs: &[Vec<u8>],
    read: impl Fn([u8; SIZE]) -> W,
    join: impl Fn(W, W) -> W,
    write: impl Fn(W) -> [u8; SIZE],
) -> Vec<u8> {
    let at = |input: &Vec<u8>, start: usize| {
        read(input[start..start + SIZE].try_into().expect("the range has this length"))
    };
    let mut output = Vec::with_capacity(inputs[0].len());
    for start in (0..inputs[0].len()).step_by(SIZE) {
        let first = at(&inputs[0], start);
        output.extend(write(inputs[1..].iter().fold(first, |sum, input| join(sum, at(input, start)))));
    }
    output
}

fn to_f32(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let two = |pair: &[u8]| [pair[0], pair[1]];
    match dtype {
        DType::Bf16 => bytes.chunks_exact(2).map(|pair| bf16::from_ne_bytes(two(pair)).to_f32()).collect(),
        DType::F16 => bytes.chunks_exact(2).map(|pair| f16::from_ne_bytes(two(pair)).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// SplitMix64's output function (Steele, Lea, Flood 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    #[test]
    fn reductions_of_floats_follow_the_order_of_the_ranks() {
        // 1e8 absorbs 1: the order shows.
        let inputs = [floats(&[1e8, 2.0]), floats(&[1.0, 4.0]), floats(&[-1e8, 9.0])];
        assert_eq!(reduce(DType::F32, ReduceOp::Sum, &inputs), floats(&[0.0, 15.0]));
        assert_eq!(reduce(DType::F32, ReduceOp::Avg, &inputs), floats(&[0.0, 5.0]));
        assert_eq!(reduce(DType::F32, ReduceOp::Min, &inputs), floats(&[-1e8, 2.0]));
        assert_eq!(reduce(DType::F32, ReduceOp::Max, &inputs), floats(&[1e8, 9.0]));
    }

    #[test]
    fn sums_of_16_bits_are_rounded_once() {
        // 256 + 0.75 + 0.75 is 257.5: bf16 keeps 8 bits, so one rounding gives 258 and two give 256.
        let inputs = [256.0, 0.75, 0.75].map(|x| bf16::from_f32(x).to_ne_bytes().to_vec());
        assert_eq!(reduce(DType::Bf16, ReduceOp::Sum, &inputs), bf16::from_f32(258.0).to_ne_bytes());
    }

    #[test]
    fn sums_of_integers_wrap() {
        assert_eq!(reduce(DType::U8, ReduceOp::Sum, &[vec![200, 1], vec![100, 2]]), [44, 3]);
        let inputs = [i32::MAX.to_ne_bytes().to_vec(), 1i32.to_ne_bytes().to_vec()];
        assert_eq!(reduce(DType::I32, ReduceOp::Sum, &inputs), i32::MIN.to_ne_bytes());
    }

    #[test]
    fn an_inexact_backend_is_held_to_rounding_only() {
        let inputs = [floats(&[0.5]), floats(&[0.25])];
        let check = |got: f32, exact| {
            same_reduction("sum", &floats(&[got]), (DType::F32, ReduceOp::Sum, &inputs), exact).is_ok()
        };
        let neighbour = f32::from_bits(0.75f32.to_bits() + 1);
        assert!(check(0.75, true) && !check(neighbour, true));
        assert!(check(neighbour, false) && !check(0.7501, false));
    }
}
