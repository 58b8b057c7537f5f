//! Tensors over device memory, and the order between libtorch's stream and others.

use std::{sync::Arc, time::Duration};

use anyroll_backends::{Buffer, DType, Device, Stream};

use super::Check;
use crate::{
    host::{Gate, download, tensor_bytes, upload},
    runner::{Stop, Verdict, same, same_bytes},
    values::random,
};

pub(super) const RULES: &[(&str, Check)] = &[
    ("tensor: shares the memory of its buffer, for every element type", shares_memory),
    ("tensor: of a slice starts at its offset", of_a_slice),
    ("tensor: keeps the memory alive when its buffer is gone", keeps_memory),
    ("tensor: libtorch's stream is ordered with others by events", libtorch_order),
];

fn shares_memory(device: &Arc<dyn Device>) -> Verdict {
    let (stream, torch) = streams(device)?;
    for dtype in DType::ALL {
        for shape in [vec![0], vec![1], vec![3, 7], vec![5, 1, 201]] {
            let len: i64 = shape.iter().product();
            let what = format!("{dtype:?} of {shape:?}");
            let bytes = random(dtype, len as usize, 8);
            let buffer = upload(&stream, &bytes, dtype)?;
            let tensor = buffer.tensor(&shape)?;
            same(&what, (tensor.kind(), tensor.size()), (dtype.kind(), shape))?;
            same_bytes(&format!("{what}, read by libtorch"), &tensor_bytes(&tensor)?, &bytes)?;

            let _ = tensor.shallow_clone().f_zero_()?;
            stream.wait_stream(&torch)?;
            same_bytes(
                &format!("{what}, written by it"),
                &download(&buffer, &stream)?,
                &vec![0; bytes.len()],
            )?;
        }
    }
    Ok(())
}

fn of_a_slice(device: &Arc<dyn Device>) -> Verdict {
    let (stream, torch) = streams(device)?;
    let bytes = random(DType::F32, 100, 9);
    let buffer = upload(&stream, &bytes, DType::F32)?;
    let tensor = buffer.slice(7..10).tensor(&[3])?;
    same_bytes("read", &tensor_bytes(&tensor)?, &bytes[7 * 4..10 * 4])?;
    let _ = tensor.shallow_clone().f_zero_()?;
    stream.wait_stream(&torch)?;
    let mut want = bytes;
    want[7 * 4..10 * 4].fill(0);
    same_bytes("written", &download(&buffer, &stream)?, &want)
}

fn keeps_memory(device: &Arc<dyn Device>) -> Verdict {
    let (stream, _) = streams(device)?;
    let allocated = || device.memory_info().map(|info| info.allocated_bytes);
    let bytes = random(DType::I64, 1001, 10);
    let buffer = upload(&stream, &bytes, DType::I64)?;
    let view = buffer.tensor(&[1001])?.f_narrow(0, 1, 1000)?;
    let held = allocated()?;
    drop(buffer);
    stream.synchronize()?;
    same("allocated while a view of the tensor is there", allocated()?, held)?;
    same_bytes("the view", &tensor_bytes(&view)?, &bytes[8..])
}

fn libtorch_order(device: &Arc<dyn Device>) -> Verdict {
    const LEN: i64 = 1001;
    let (stream, torch) = streams(device)?;
    let buffer = Buffer::zeros(&stream, LEN as usize, DType::U8)?;
    let tensor = buffer.tensor(&[LEN])?;
    for round in 1..20 {
        let gate = Gate::close(&stream)?;
        buffer.fill(round, &stream)?;
        gate.open_after(Duration::from_millis(1));
        torch.wait_stream(&stream)?; // on a CPU this blocks: libtorch computes on this very thread
        let _ = tensor.shallow_clone().f_add_scalar_(1)?;
        stream.wait_stream(&torch)?;
        let what = format!("round {round}");
        same_bytes(&what, &download(&buffer, &stream)?, &[round + 1; LEN as usize])?;
    }
    Ok(())
}

/// A stream of our own and libtorch's, or a skip.
fn streams(device: &Arc<dyn Device>) -> Result<(Stream, Stream), Stop> {
    if device.torch_device().is_none() {
        return Err(Stop::Skipped(format!("libtorch does not compute on {}", device.id())));
    }
    Ok((Stream::new(device)?, Stream::torch(device)?))
}
