//! Sums and means of tokens' values over their sequences.

use tch::Tensor;

use super::Result;

/// Returns for each token the sum of `values` `[M]` over its sequence, without a gradient.
pub fn sequence_sums(values: &Tensor, lengths: &[i64]) -> Result<Tensor> {
    let tokens: i64 = lengths.iter().sum();
    let lengths = Tensor::f_from_slice(lengths)?.f_to_device(values.device())?;
    // A segmented reduction, and not a scattered addition: devices may change the order of the latter, and thus its
    // bits. The lengths are unchecked, since a check would wait for the device.
    let unchecked = true;
    let (indices, offsets) = (None::<&Tensor>, None::<&Tensor>);
    let values = values.f_detach()?;
    let sums = Tensor::f_segment_reduce(&values, "sum", Some(&lengths), indices, offsets, 0, unchecked, 0.0)?;
    sums.f_repeat_interleave_self_tensor(&lengths, 0, tokens)
}

/// Divides [`sequence_sums`] by the sequence's length.
pub fn sequence_means(values: &Tensor, lengths: &[i64]) -> Result<Tensor> {
    sequence_sums(values, lengths)?.f_div(&sequence_sums(&values.f_ones_like()?, lengths)?)
}
