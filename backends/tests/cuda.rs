//! Behaviour of the CUDA backend beyond the contract that the conformance suite checks. Without an NVIDIA GPU every test but
//! the first reports that it is skipped, and why.

use std::{
    io::Write,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use anyroll_backends::{
    Arena, BackendKind, Buffer, CollectiveGroup, DType, Device, DeviceId, Error, PinnedBuffer, ReduceOp,
    Rendezvous, Stream, connect, devices, open, ops,
};
use anyroll_close::largest_difference;
use tch::{Kind, Tensor};

const ID: DeviceId = DeviceId { backend: BackendKind::CUDA, ordinal: 0 };
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

/// The first GPU, for one test at a time, since some count what is allocated; without one says so past the harness, which
/// keeps what passing tests print.
fn device() -> Option<(Arc<dyn Device>, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    match open(ID) {
        Ok(device) => Some((device, ALONE.lock().unwrap_or_else(PoisonError::into_inner))),
        Err(error @ Error::Unavailable { .. }) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_machine_without_it_says_what_was_tried() {
    for error in [open(ID).err(), devices(BackendKind::CUDA).err()].into_iter().flatten() {
        let Error::Unavailable { backend, tried, reason } = error else { panic!("{error}") };
        assert_eq!(backend, BackendKind::CUDA);
        assert!(!tried.is_empty() && !reason.is_empty(), "{tried:?}: {reason}");
    }
}

#[test]
fn a_device_is_opened_once_and_describes_itself() {
    let Some((device, _alone)) = device() else { return };
    assert!(Arc::ptr_eq(&device, &open(ID).unwrap()));
    let all = devices(BackendKind::CUDA).unwrap();
    for info in &all {
        eprintln!("{} {}: {:?}", info.id, info.name, info.details);
        assert!(info.details.iter().any(|(name, value)| name == "PCIe" && value.contains(':')));
    }
    let error = open(DeviceId { ordinal: all.len(), ..ID }).unwrap_err().to_string();
    assert!(error.contains(&format!("sees {} devices", all.len())), "{error}");
}

#[test]
fn an_arena_gives_its_memory_back_and_keeps_its_address() {
    let Some((device, _alone)) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    // More than one piece of physical memory, and not a multiple of a piece.
    let len = 5 * GIB + 6 * MIB;
    // First, since what it takes of the host's is listed in the device's memory.
    let mut host = PinnedBuffer::new(&device, len).unwrap();
    let before = device.memory_info().unwrap();
    let arena = Arena::new("weights", &stream, len).unwrap();
    let whole = arena.buffer(0..arena.len_bytes(), DType::U8);
    let tensor = whole.tensor(&[whole.len() as i64]).unwrap();
    let mapped = device.memory_info().unwrap();
    assert!(before.free_bytes - mapped.free_bytes >= len, "{before:?} {mapped:?}");
    assert_eq!(mapped.allocated_bytes, before.allocated_bytes + arena.len_bytes());

    let pattern = |index: usize| (index.wrapping_mul(0x9e37_79b9) >> 7) as u8;
    let words = host.bytes_mut().unwrap();
    words.iter_mut().enumerate().step_by(509).for_each(|(index, byte)| *byte = pattern(index));
    host.copy_to(0, &whole, &stream).unwrap();
    stream.synchronize().unwrap();

    let address = tensor.data_ptr();
    arena.unmap().unwrap();
    let released = device.memory_info().unwrap();
    assert!(released.free_bytes - mapped.free_bytes >= len, "{mapped:?} {released:?}");
    assert_eq!(released.allocated_bytes, before.allocated_bytes);
    assert!(matches!(whole.raw(), Err(Error::Released { .. })));

    arena.map().unwrap();
    whole.fill(0xee, &stream).unwrap();
    host.copy_to(0, &whole, &stream).unwrap();
    host.bytes_mut().unwrap().fill(0);
    host.copy_from(0, &whole, &stream).unwrap();
    let bytes = host.bytes().unwrap();
    let right = |index: usize| bytes[index] == if index.is_multiple_of(509) { pattern(index) } else { 0 };
    assert!((0..bytes.len()).all(right));
    assert_eq!(tensor.data_ptr(), address);
    stream.synchronize().unwrap();
    let last = bytes.len() - 1;
    assert_eq!(tensor.int64_value(&[last as i64]), i64::from(bytes[last]));

    drop((tensor, whole, arena));
    let after = device.memory_info().unwrap();
    assert!(after.free_bytes + 64 * MIB >= before.free_bytes, "{before:?} {after:?}");
}

#[test]
fn copies_cross_the_borders_of_registrations() {
    let Some((device, _alone)) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    let mut from = PinnedBuffer::new(&device, 2 * GIB + 4096).unwrap();
    let mut to = PinnedBuffer::new(&device, 2 * GIB + 4096).unwrap();
    for (offset, len) in [(GIB - 64, 128), (GIB - 4096, GIB + 8192), (2 * GIB, 4096)] {
        for (index, byte) in from.bytes_mut().unwrap()[offset..offset + len].iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        let buffer = Buffer::zeros(&stream, len, DType::U8).unwrap();
        from.copy_to(offset, &buffer, &stream).unwrap();
        to.copy_from(offset, &buffer, &stream).unwrap();
        let same = from.bytes().unwrap()[offset..offset + len] == to.bytes().unwrap()[offset..offset + len];
        assert!(same, "{len} bytes at {offset}");
    }
    let pinned = device.memory_info().unwrap().pinned_bytes;
    drop((from, to));
    assert_eq!(device.memory_info().unwrap().pinned_bytes, pinned - 2 * (2 * GIB + 4096));
}

#[test]
fn libtorch_works_on_our_memory_in_our_order() {
    let Some((device, _alone)) = device() else { return };
    let (ours, torch) = (Stream::new(&device).unwrap(), Stream::torch(&device).unwrap());
    let buffer = Buffer::zeros(&ours, 1 << 22, DType::F32).unwrap();
    let tensor = buffer.tensor(&[1 << 22]).unwrap();
    assert_eq!(tensor.device(), tch::Device::Cuda(0));
    for round in 0..50 {
        torch.wait_stream(&ours).unwrap();
        let _ = tensor.shallow_clone().fill_(1.0 + f64::from(round));
        ours.wait_stream(&torch).unwrap();
        let copy = Buffer::zeros(&ours, 1 << 22, DType::F32).unwrap();
        copy.copy_from(&buffer, &ours).unwrap();
        buffer.fill(0, &ours).unwrap();
        torch.wait_stream(&ours).unwrap();
        let sum = copy.tensor(&[1 << 22]).unwrap().sum(Kind::Double).double_value(&[]);
        assert_eq!(sum, (1.0 + f64::from(round)) * f64::from(1 << 22));
    }
}

#[test]
fn an_allocation_that_does_not_fit_says_how_much_is_free() {
    let Some((device, _alone)) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    let total = device.memory_info().unwrap().total_bytes;
    for error in [
        Buffer::zeros(&stream, total, DType::F32).map(drop).unwrap_err(),
        Arena::new("too large", &stream, 2 * total).map(drop).unwrap_err(),
    ] {
        let Error::OutOfMemory { requested_bytes, free_bytes, .. } = error else { panic!("{error}") };
        assert!(requested_bytes >= 2 * total && free_bytes > 0 && free_bytes <= total);
    }
    // What is released counts as free at once, also while its release is pending.
    let most = device.memory_info().unwrap().free_bytes / 10 * 8;
    for _ in 0..3 {
        Buffer::zeros(&stream, most, DType::U8).unwrap();
    }
}

#[test]
fn host_work_runs_in_order_and_its_failure_is_the_streams() {
    let Some((device, _alone)) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    stream.enqueue_host_fn(Box::new(|| Err("first".into()))).unwrap();
    stream.enqueue_host_fn(Box::new(|| panic!("second"))).unwrap();
    let error = stream.synchronize().unwrap_err().to_string();
    assert!(error.contains("first"), "{error}");
    stream.synchronize().unwrap();
    stream.enqueue_host_fn(Box::new(|| panic!("third"))).unwrap();
    assert!(stream.synchronize().unwrap_err().to_string().contains("third"));
}

#[test]
fn a_single_rank_takes_the_same_path() {
    let Some((device, _alone)) = device() else { return };
    let timeout = Duration::from_secs(60);
    let rendezvous = Rendezvous::in_this_process(1, timeout).unwrap().remove(0);
    let group =
        |name| CollectiveGroup::new(name, connect(&*device, &rendezvous).unwrap(), &device, timeout).unwrap();
    let (first, second) = (group("first"), group("second"));
    let stream = Stream::torch(&device).unwrap();
    for group in [&first, &second, &first.split("child", Some(3), 0).unwrap().unwrap()] {
        let buffer = Buffer::zeros(&stream, 100_003, DType::Bf16).unwrap();
        let tensor = buffer.tensor(&[100_003]).unwrap();
        let values = Tensor::randn([100_003], (Kind::BFloat16, tensor.device()));
        tensor.shallow_clone().copy_(&values);
        group.all_reduce(&buffer, ReduceOp::Avg, &stream).unwrap().wait_stream(&stream).unwrap();
        group.barrier(&stream).unwrap().wait().unwrap();
        assert!(tensor.equal(&values));
    }
    assert!(first.split("nobody", None, 0).unwrap().is_none());
    first.abort();
    let buffer = Buffer::zeros(&stream, 8, DType::F32).unwrap();
    let error = first.all_reduce(&buffer, ReduceOp::Sum, &stream).unwrap_err();
    assert!(matches!(error, Error::Aborted { .. }), "{error}");
    second.check().unwrap();
}

/// One kernel makes both products of these shapes, with more shared memory if more blocks share a tile.
#[test]
fn threads_launch_one_kernel_with_different_shared_memory() {
    let Some(_alone) = device() else { return };
    let at = (Kind::BFloat16, tch::Device::Cuda(0));
    let products = [(512i64, 8960i64), (1536, 1536)].map(|(rows, columns)| {
        let x = Tensor::randn([64, columns], (Kind::Float, at.1)).to_kind(at.0);
        let weight = Tensor::randn([rows, columns], (Kind::Float, at.1)).to_kind(at.0);
        (x, weight)
    });
    let product = |(x, weight): &(Tensor, Tensor)| {
        let mut y = Tensor::zeros([64, weight.size()[0]], at);
        ops::add_linear_(&mut y, x, weight).unwrap();
        y
    };
    thread::scope(|scope| {
        for of in products {
            scope.spawn(move || {
                let alone = of.0.matmul(&of.1.tr());
                (0..2000).for_each(|_| drop(product(&of)));
                let apart = largest_difference(&product(&of), &alone);
                assert!(apart <= 1e-2 * alone.abs().max().double_value(&[]), "{apart}");
            });
        }
    });
}
