//! The sum of what all ranks computed.

use tch::Tensor;

use super::check::{Args, Engine};
use super::{Result, Store, composite};
use crate::kernels;

/// Writes the sum of the rows of `received` `[W, N]`, one a rank, to the fp32 `out` `[N]`, or adds it: in fp32, from the
/// first rank to the last.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit, or libtorch's error.
pub fn sum_ranks(received: &Tensor, out: &mut Tensor, how: Store) -> Result<()> {
    let Some(Engine::Device(device)) = Engine::of(received) else {
        return composite::sum_ranks(received, out, how);
    };
    let args = Args::new("sum_ranks", received);
    let [world_size, len] = args.dims("received", received)?;
    let from = args.values("received", received, &[world_size, len])?;
    let to = args.floats("out", out, &[len])?;
    // SAFETY: the sizes of both tensors were checked, `out` is borrowed mutably, and both outlive the work.
    args.launched(device.torch_stream().and_then(|stream| unsafe {
        kernels::strategy::sum_ranks(
            &*device,
            args.kind(),
            to,
            from,
            (world_size, len),
            how == Store::Add,
            stream,
        )
    }))
}
