//! Matrices in 8 bits: e4m3 (4 bits of exponent, 3 of mantissa, at most 448) with a scale for each row.
//!
//! A row's scale is the smallest power of two with which no value exceeds 448, so that each value of the matrix in 8 bits is
//! exactly one of fp32 and of bf16, and a product has the sums of the same values in 16 bits. The matrix is one tensor of
//! e4m3, `[rows + scales, columns]`: the rows, and behind them the bytes of the fp32 scales. If columns are a multiple of 64,
//! each 64 of them lie in the order in which a kernel multiplies them ([`paired`]).

use tch::{Kind, Tensor};

use super::Result;

/// Largest value of e4m3.
const LARGEST: f64 = 448.0;
const EIGHT_BITS: Kind = Kind::Float8e4m3fn;
/// Smallest scale: that of a row of zeros.
const LEAST_SCALE: f64 = 1.0 / (1u128 << 100) as f64;
/// Values that are converted at a time.
const CHUNK: i64 = 1 << 24;
/// Multiple of a matrix's columns, for the alignment of its scales.
pub const EIGHT_BIT_COLUMNS: i64 = 8;

/// Returns the number of rows that hold the scales of a matrix `[rows, columns]`.
pub fn rows_of_scales([rows, columns]: [i64; 2]) -> i64 {
    (rows * size_of::<f32>() as i64 + columns - 1) / columns
}

/// Returns true for what [`in_eight_bits`] returns.
pub fn is_in_eight_bits(matrix: &Tensor) -> bool {
    matrix.kind() == EIGHT_BITS
}

/// Returns a matrix `[rows, columns]` in 8 bits, rounded to the nearest. `columns` is a multiple of [`EIGHT_BIT_COLUMNS`].
/// A row that holds a value which is no number has none in 8 bits.
///
/// # Errors
/// libtorch's (out of memory).
pub fn in_eight_bits(matrix: &Tensor) -> Result<Tensor> {
    let size = <[i64; 2]>::try_from(matrix.size()).expect("a matrix");
    let [rows, columns] = size;
    assert!(columns % EIGHT_BIT_COLUMNS == 0, "{columns} columns");
    let place = (EIGHT_BITS, matrix.device());
    let packed = Tensor::f_empty([rows + rows_of_scales(size), columns], place)?;
    drop(packed.f_narrow(0, rows, rows_of_scales(size))?.f_view_dtype(Kind::Uint8)?.f_zero_()?);
    let (values, scales) = parts(&packed)?;
    let at_once = (CHUNK / columns).max(1);
    for start in (0..rows).step_by(at_once as usize) {
        let part = |of: &Tensor| of.f_narrow(0, start, at_once.min(rows - start));
        let wide = part(matrix)?.f_to_kind(Kind::Float)?;
        let of_rows = scales_of(&wide)?;
        let (mut to, from) = paired(&part(&values)?, &wide.f_div(&of_rows.f_unsqueeze(1)?)?)?;
        to.f_copy_(&from)?;
        part(&scales)?.f_copy_(&of_rows)?;
    }
    Ok(packed)
}

/// Returns the scales of the rows of an fp32 matrix.
pub(super) fn scales_of(wide: &Tensor) -> Result<Tensor> {
    let largest = wide.f_abs()?.f_amax([1i64].as_slice(), false)?;
    let least = largest.f_div_scalar(LARGEST)?.f_clamp_min(LEAST_SCALE)?;
    // The next power of two is that of the exponent, or the one above if there is a mantissa.
    let bits = least.f_view_dtype(Kind::Int)?;
    let power = bits.f_add_scalar(0x007f_ffff)?.f_bitwise_and(0x7f80_0000i64)?.f_view_dtype(Kind::Float)?;
    // Infinities and values that are no numbers make the scale no number.
    Ok(power.f_add(&largest.f_mul_scalar(0.0)?)?)
}

/// Returns the number of rows without those of the scales.
pub(super) fn rows_of(packed: &Tensor) -> i64 {
    let columns = packed.size()[1];
    packed.numel() as i64 / (columns + size_of::<f32>() as i64)
}

/// Returns the values in 8 bits `[rows, columns]` of a matrix, and its scales, fp32 `[rows]`.
pub(super) fn parts(packed: &Tensor) -> Result<(Tensor, Tensor)> {
    let rows = rows_of(packed);
    let behind = packed.size()[0] - rows;
    let bytes = packed.f_narrow(0, rows, behind)?.f_view_dtype(Kind::Uint8)?.f_flatten(0, 1)?;
    let scales = bytes.f_narrow(0, 0, rows * size_of::<f32>() as i64)?.f_view_dtype(Kind::Float)?;
    Ok((packed.f_narrow(0, 0, rows)?, scales))
}

/// Views of the values of a matrix in 8 bits and of the same matrix otherwise, whose elements correspond. Of each 64 columns
/// in 8 bits, 16 neighbours are those of a thread of the kernel: four of each 16 columns.
fn paired(values: &Tensor, wide: &Tensor) -> Result<(Tensor, Tensor)> {
    let [rows, columns] = <[i64; 2]>::try_from(wide.size()).expect("a matrix");
    if columns % 64 != 0 {
        return Ok((values.shallow_clone(), wide.shallow_clone()));
    }
    let of_threads = values.f_view([rows, columns / 64, 4, 4, 2, 2])?;
    Ok((of_threads.f_permute([0, 1, 3, 4, 2, 5])?, wide.f_view([rows, columns / 64, 4, 2, 4, 2])?))
}

/// Returns a matrix in the dtype `kind`: the same one if it is not in 8 bits.
///
/// # Errors
/// libtorch's (out of memory).
pub fn widened(matrix: &Tensor, kind: Kind) -> Result<Tensor> {
    if !is_in_eight_bits(matrix) {
        return Ok(matrix.shallow_clone());
    }
    let (values, scales) = parts(matrix)?;
    // fp16 has no place for small scales.
    let exact = if kind == Kind::Half { Kind::Float } else { kind };
    let mut wide = Tensor::f_empty(values.size(), (exact, values.device()))?;
    let (from, mut to) = paired(&values, &wide)?;
    to.f_copy_(&from)?;
    drop(wide.f_mul_(&scales.f_to_kind(exact)?.f_unsqueeze(1)?)?);
    Ok(wide.f_to_kind(kind)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::tests::*;

    /// The nearest value of e4m3 with this scale, by arithmetic on fp64; ties go to the even mantissa.
    fn nearest(value: f64, scale: f64) -> f64 {
        let scaled = value / scale;
        let exponent = scaled.abs().log2().floor().max(-6.0);
        let step = 2f64.powf(exponent - 3.0);
        (scaled / step).round_ties_even() * step * scale
    }

    #[test]
    fn values_are_the_nearest_ones_of_eight_bits() {
        for &place in PLACES.iter() {
            let [small, large, zeros] = [
                random(&[5, 48], place) * 1e-3,
                random(&[7, 48], place) * 300.0,
                random(&[1, 48], place) * 0.0,
            ];
            let spread = random(&[6, 48], place).pow_tensor_scalar(9) * 0.1;
            let matrix = Tensor::cat(&[small, large, zeros, spread], 0);
            let packed = in_eight_bits(&matrix).unwrap();
            assert_eq!(packed.size(), [19 + 2, 48]);
            let found = widened(&packed, Kind::Double).unwrap();
            let doubles = |of: &Tensor| Vec::<f64>::try_from(of.to_kind(Kind::Double).flatten(0, 1)).unwrap();
            for (row, (given, found)) in
                doubles(&matrix).chunks(48).zip(doubles(&found).chunks(48)).enumerate()
            {
                let largest = given.iter().fold(0f64, |largest, value| largest.max(value.abs()));
                let scale = if largest == 0.0 { 1.0 } else { 2f64.powf((largest / 448.0).log2().ceil()) };
                for (&given, &found) in given.iter().zip(found) {
                    assert_eq!(
                        found,
                        nearest(given, scale),
                        "{given} in row {row} with {scale} in {place:?}"
                    );
                }
            }
        }
    }

    /// libtorch's own rounding to e4m3, with the scale on both sides.
    #[test]
    fn values_are_those_of_a_cast() {
        let matrix = random(&[9, 64], (Kind::Float, tch::Device::Cpu));
        let packed = in_eight_bits(&matrix).unwrap();
        let scales = parts(&packed).unwrap().1.unsqueeze(1);
        let values = widened(&packed, Kind::Float).unwrap() / &scales;
        let cast = (&matrix / scales).to_kind(Kind::Float8e4m3fn).to_kind(Kind::Float);
        assert_eq!(values, cast);
        let largest = values.abs().amax([1i64].as_slice(), false);
        assert!(bool::try_from(largest.gt(223.9).all()).unwrap(), "{largest}");
    }

    #[test]
    fn what_is_no_number_stays_none_and_other_rows_are_as_they_were() {
        let matrix = random(&[3, 16], (Kind::Float, tch::Device::Cpu));
        let _ = matrix.get(0).narrow(0, 3, 1).fill_(f64::NAN);
        let _ = matrix.get(1).narrow(0, 5, 1).fill_(f64::INFINITY);
        let wide = widened(&in_eight_bits(&matrix).unwrap(), Kind::Float).unwrap();
        let is_none = |row: i64| bool::try_from(wide.get(row).isnan().any()).unwrap();
        assert_eq!([0, 1, 2].map(is_none), [true, true, false]);
    }
}
