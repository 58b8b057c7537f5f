//! Kernels against the composite operations, and those against libtorch's own functions and autograd.

use std::io::Write;
use std::sync::{Arc, LazyLock};

use anyroll_close::assert_close;
use tch::{Device, Kind, Tensor};

use super::{
    Activation, AttentionOptions, AttentionOutput, Causal, Packing, Qkv, QkvGrads, Rotation, Store, composite,
};
use crate::{BackendKind, DeviceId, Error, kernels::Narrow};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Between two orders of the same fp32 sums, relative to the largest value of a tensor.
const KERNEL_TOLERANCE: f64 = 1e-5;

/// Devices with kernels, and their dtypes: the CPU, and the first GPU. Without a GPU it reports that past the harness.
pub(super) static PLACES: LazyLock<Vec<(Kind, Device)>> = LazyLock::new(|| {
    let mut places = vec![FLOAT];
    match &*GPU {
        Ok(_) => places.extend([Kind::Float, Kind::BFloat16, Kind::Half].map(|kind| (kind, Device::Cuda(0)))),
        Err(error @ Error::Unavailable { .. }) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED on a GPU: {error}");
        }
        Err(error) => panic!("{error}"),
    }
    places
});
/// Open as long as the tests run: a tensor's kernels are its open device's.
static GPU: LazyLock<crate::Result<Arc<dyn crate::Device>>> =
    LazyLock::new(|| crate::open(DeviceId { backend: BackendKind::CUDA, ordinal: 0 }));

/// Error of one rounding of the result, and for 16 bits of a few roundings within attention. In fp32 the order of sums differs,
/// also between processors: 1.1e-5 was seen in attention.
pub(super) fn tolerance(kind: Kind, roundings: f64) -> f64 {
    match kind {
        Kind::BFloat16 => roundings * 0.5f64.powi(8),
        Kind::Half => roundings * 0.5f64.powi(11),
        _ => (roundings / 2.0).max(1.0) * KERNEL_TOLERANCE,
    }
}

/// Widths around the 16 lanes of a vector.
const WIDTHS: [i64; 6] = [1, 7, 16, 20, 64, 129];

/// Numbers that are the same in every run.
pub(super) fn random(size: &[i64], options: (Kind, Device)) -> Tensor {
    let count: i64 = size.iter().product();
    // The fractional parts of multiples of an irrational number, in a mixed order.
    let mix = |i: i64| (((i * i + 7 * i) % 10_007) as f64 * 0.618_033_988_749_894_9).fract() * 3.0 - 1.5;
    let values = Tensor::from_slice(&(0..count).map(mix).collect::<Vec<f64>>()).view(size);
    values.to_kind(options.0).to_device(options.1)
}

/// Runs an operation by its kernel and by its composite form on copies of the same tensors and compares all
/// of them and what is returned.
fn compare(what: &str, tensors: &[Tensor], run: impl FnMut(&mut [Tensor], bool) -> Vec<Tensor>) {
    compare_within(tolerance(tensors[0].kind(), 2.0), what, tensors, run);
}

fn compare_within(
    tolerance: f64,
    what: &str,
    tensors: &[Tensor],
    mut run: impl FnMut(&mut [Tensor], bool) -> Vec<Tensor>,
) {
    let mut results = [true, false].map(|kernel| {
        let mut copies: Vec<Tensor> = tensors.iter().map(Tensor::copy).collect();
        let returned = run(&mut copies, kernel);
        copies.into_iter().chain(returned).collect::<Vec<Tensor>>()
    });
    let [kernel, composite] = &mut results;
    for (index, (kernel, composite)) in kernel.iter().zip(composite.iter()).enumerate() {
        assert_eq!(kernel.kind(), composite.kind(), "{what}, tensor {index}");
        let place = (tensors[0].kind(), tensors[0].device());
        assert_close(&format!("{what}, tensor {index}, {place:?}"), kernel, composite, tolerance);
    }
}

fn pair((a, b): (Tensor, Tensor)) -> Vec<Tensor> {
    vec![a, b]
}

#[test]
fn norm_kernels_equal_composites() {
    for (&at, dim) in pairs(&PLACES, WIDTHS) {
        for heads in [1, 3] {
            // Heads are a view of wider rows.
            let x = random(&[300, heads + 2, dim], at).narrow(1, 1, heads);
            let (x, weight) = (if heads == 1 { x.flatten(1, 2).contiguous() } else { x }, random(&[dim], at));
            let what = format!("{heads} heads of {dim}, {at:?}");
            let (y, rstd) = super::rms_norm(&x, &weight, 1e-5).unwrap();
            let (expected_y, expected_rstd) = composite::rms_norm(&x, &weight, 1e-5).unwrap();
            assert_close(&what, &y, &expected_y, tolerance(at.0, 2.0));
            assert_close(&what, &rstd, &expected_rstd, KERNEL_TOLERANCE);
            for how in [Store::Write, Store::Add] {
                let tensors = [y.shallow_clone(), random(&y.size(), at), random(&[dim], at)];
                compare(&what, &tensors, |tensors, kernel| {
                    let [dy, dx, dweight] = tensors else { unreachable!() };
                    let run = if kernel { super::rms_norm_backward_ } else { composite::rms_norm_backward_ };
                    run(dy, &x, &rstd, &weight, dx, dweight, how).unwrap();
                    vec![]
                });
            }
        }
        let tensors = [random(&[40, dim], at)];
        let (residual, weight) = (random(&[40, dim], at) * 2.0, random(&[dim], at));
        compare(&format!("residual of {dim}"), &tensors, |tensors, kernel| {
            let run = if kernel { super::add_rms_norm_ } else { composite::add_rms_norm_ };
            pair(run(&mut tensors[0], &residual, &weight, 1e-5).unwrap())
        });
    }
}

#[test]
fn elementwise_kernels_equal_composites() {
    for (&at, width) in pairs(&PLACES, WIDTHS) {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let tensors = [random(&[50, 2 * width], at) * 8.0, random(&[50, width], at)];
            compare(&format!("{activation:?} of {width}"), &tensors, |tensors, kernel| {
                let [gate_up, dy] = tensors else { unreachable!() };
                let forward = if kernel { super::glu } else { composite::glu };
                let y = forward(gate_up, activation).unwrap();
                let backward = if kernel { super::glu_backward_ } else { composite::glu_backward_ };
                backward(gate_up, dy, activation).unwrap();
                vec![y]
            });
        }
        let dim = 2 * width;
        let packing = Packing::new(&[5, 0, 21], at.1).unwrap();
        // All of a head, and three quarters of it.
        for (turned, rotation) in pairs(&[dim, 2 * (3 * width / 4)], [Rotation::Forward, Rotation::Inverse]) {
            let table = rope_table(21, *turned, 50.0).to_device(at.1);
            let what = format!("rope of {turned} of {dim}");
            compare(&what, &[random(&[26, 5, dim], at)], |tensors, kernel| {
                let run = if kernel { super::rope_ } else { composite::rope_ };
                run(&mut tensors[0].narrow(1, 1, 3), packing.positions(), &table, rotation).unwrap();
                vec![]
            });
        }
    }
}

#[test]
fn dropout_kernels_have_the_mask_of_composites() {
    for (&at, columns) in pairs(&PLACES, WIDTHS) {
        // Keys up to the largest, whose upper half a signed product would lose.
        let keys: Vec<i64> = (0..40).map(|row| (row * 0x0cc9_e2d5_1b87 + 7) & 0xffff_ffff).collect();
        let keys = Tensor::from_slice(&keys).to_device(at.1);
        for (salt, probability) in [(0, 0.1), (u32::MAX, 0.5), (7, 0.0), (3, 0.999)] {
            let dropout = super::Dropout { keys: &keys, salt, probability };
            compare(&format!("{columns} columns"), &[random(&[40, columns], at)], |tensors, kernel| {
                let run = if kernel { super::dropout } else { composite::dropout };
                vec![run(&tensors[0], dropout).unwrap()]
            });
        }
    }
}

/// Shares of what is dropped, alone and together with the neighbour in the row, in the column and under the next salt,
/// against those of independent masks; and the mean, which stays.
#[test]
fn what_is_dropped_is_independent() {
    let (rows, columns, probability) = (500, 400, 0.3);
    // As neighbours have them: keys in a row.
    let keys = Tensor::arange(rows, (Kind::Int64, Device::Cpu));
    let mask = |salt| {
        let ones = Tensor::ones([rows, columns], FLOAT);
        super::dropout(&ones, super::Dropout { keys: &keys, salt, probability }).unwrap()
    };
    let (kept, other) = (mask(5), mask(6));
    let dropped = |mask: &Tensor| mask.eq(0.0).to_kind(Kind::Double);
    let mean = |tensor: &Tensor| tensor.to_kind(Kind::Double).mean(None).double_value(&[]);
    assert!((mean(&kept) - 1.0).abs() < 0.01, "{}", mean(&kept));
    let (first, second) = (dropped(&kept), dropped(&other));
    let both = |a: &Tensor, b: &Tensor| mean(&(a * b));
    let along = |dim| both(&first.narrow(dim, 0, 399), &first.narrow(dim, 1, 399));
    for (what, share, expected) in [
        ("alone", mean(&first), probability),
        ("with the next column", along(1), probability * probability),
        ("with the next row", along(0), probability * probability),
        ("with the next salt", both(&first, &second), probability * probability),
    ] {
        assert!((share - expected).abs() < 0.006, "{what}: {share}, expected {expected}");
    }
    let of_rows = first.mean_dim([1i64].as_slice(), false, None);
    let spread = of_rows.std(true).double_value(&[]);
    let expected = (probability * (1.0 - probability) / columns as f64).sqrt();
    assert!((spread / expected - 1.0).abs() < 0.15, "rows differ by {spread}, expected {expected}");
}

#[test]
fn logprob_kernels_equal_composites() {
    for (&at, vocab) in pairs(&PLACES, WIDTHS) {
        let targets = Tensor::arange(60, (Kind::Int64, at.1)).remainder(vocab);
        let (dlogprobs, dentropy) =
            (random(&[60], (Kind::Float, at.1)), random(&[60], (Kind::Float, at.1)) * 2.0);
        for dentropy in [None, Some(&dentropy)] {
            let tensors = [random(&[60, vocab], at) * 10.0];
            compare(&format!("vocabulary of {vocab}"), &tensors, |tensors, kernel| {
                let logits = &mut tensors[0];
                let forward = if kernel { super::logprobs } else { composite::logprobs };
                let scores = forward(logits, &targets, 0.7).unwrap();
                let backward = if kernel { super::logprobs_backward_ } else { composite::logprobs_backward_ };
                backward(logits, &targets, 0.7, (&scores.lse, &scores.entropy), &dlogprobs, dentropy)
                    .unwrap();
                vec![scores.logprobs, scores.entropy, scores.lse]
            });
        }
    }
}

#[test]
fn sum_kernels_equal_composites() {
    for (&at, columns) in pairs(&PLACES, WIDTHS) {
        for how in [Store::Write, Store::Add] {
            let (dy, tokens) = (random(&[700, columns], at), Tensor::arange(700, (Kind::Int64, at.1)));
            let tokens = tokens.square().remainder(11);
            let tensors = [random(&[11, columns], at), random(&[columns], at)];
            compare(&format!("{columns} columns"), &tensors, |tensors, kernel| {
                let [dweight, sums] = tensors else { unreachable!() };
                let run = if kernel { super::embedding_backward } else { composite::embedding_backward };
                run(&dy, &tokens, dweight, how).unwrap();
                let run = if kernel { super::sum_rows } else { composite::sum_rows };
                run(&dy, sums, how).unwrap();
                vec![]
            });
        }
    }
}

#[test]
fn ranks_are_summed_in_their_order() {
    for (&at, len) in pairs(&PLACES, [1, 7, 64, 1001, 4096]) {
        for (ranks, how) in [(1, Store::Write), (3, Store::Add), (4, Store::Write)] {
            let received = random(&[ranks, len], at);
            let mut sums = [(); 2].map(|()| random(&[len], (Kind::Float, at.1)) * 3.0);
            super::sum_ranks(&received, &mut sums[0], how).unwrap();
            composite::sum_ranks(&received, &mut sums[1], how).unwrap();
            assert!(sums[0].equal(&sums[1]), "{ranks} ranks of {len}, {at:?}");
        }
    }
}

fn pairs<T, U: Copy, const N: usize>(all: &[T], with: [U; N]) -> impl Iterator<Item = (&T, U)> {
    all.iter().flat_map(move |one| with.map(|other| (one, other)))
}

/// `(query heads, key heads, head dim)`.
const HEADS: [(i64, i64, i64); 5] = [(4, 4, 16), (4, 2, 6), (3, 1, 24), (2, 1, 64), (1, 1, 1)];

/// Windows within a vector and beyond it, around a whole sequence, and longer than all.
const WINDOWS: [Option<i64>; 6] = [None, Some(1), Some(5), Some(17), Some(69), Some(200)];

#[test]
fn attention_kernels_equal_composites() {
    // Of unequal lengths, and of one that a library may plan for.
    let lengths: [&[i64]; 3] = [&[13, 0, 1, 16, 2, 70, 17], &[1, 1, 1], &[128, 128]];
    for ((&at, (heads, kv_heads, dim)), lengths) in
        pairs(&PLACES, HEADS).flat_map(|case| lengths.map(|l| (case, l)))
    {
        let packing = Packing::new(lengths, at.1).unwrap();
        let rows = packing.tokens();
        let qkv = random(&[rows, heads + 2 * kv_heads, dim], at) * 2.0;
        let views = |whole: &Tensor| {
            [(0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)]
                .map(|(start, count)| whole.narrow(1, start, count))
        };
        let ([q, k, v], dout) = (views(&qkv), random(&[rows, heads * dim], at));
        for (deterministic, window) in pairs(&[true, false], WINDOWS) {
            let (deterministic, causal) = (*deterministic, Causal { scale: 0.3, window });
            let what = format!("{heads} heads, {kv_heads} of {dim}, {lengths:?}, {window:?}");
            compare_within(tolerance(at.0, 8.0), &what, &[qkv.zeros_like()], |tensors, kernel| {
                let forward = if kernel { super::attention } else { composite::attention };
                let (out, lse) = forward(&q, &k, &v, &packing, causal).unwrap();
                let [mut dq, mut dk, mut dv] = views(&tensors[0]);
                let backward = if kernel { super::attention_backward } else { composite::attention_backward };
                let (qkv, output) = (Qkv { q: &q, k: &k, v: &v }, AttentionOutput { out: &out, lse: &lse });
                let options = AttentionOptions { packing: &packing, causal, deterministic };
                let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
                backward(&dout, qkv, output, options, grads).unwrap();
                vec![out, lse]
            });
        }
    }
}

/// In 16 bits on a GPU, against fp32: by our kernels where the device has them, whose tiles have 64 and 128 rows.
#[test]
fn attention_repeats_and_is_that_of_wide_values() {
    let lengths: [&[i64]; 3] = [&[300, 1, 0, 64, 129, 65], &[256, 256], &[700, 128]];
    let heads = [(6, 2, 128), (1, 1, 128), (7, 1, 64), (4, 4, 64)];
    let is_narrow = |place: &&(Kind, Device)| Narrow::of(place.0).is_some();
    for (&at, ((heads, kv_heads, dim), lengths)) in
        PLACES.iter().filter(is_narrow).flat_map(|at| pairs(&heads, lengths).map(move |case| (at, case)))
    {
        let packing = Packing::new(lengths, at.1).unwrap();
        let rows = packing.tokens();
        // Rows lie apart by a head that belongs to nobody.
        let qkv = random(&[rows, heads + 2 * kv_heads + 1, *dim], at);
        let views = |whole: &Tensor| {
            [(0, *heads), (*heads, *kv_heads), (heads + kv_heads, *kv_heads)]
                .map(|(start, count)| whole.narrow(1, start, count))
        };
        let dout = random(&[rows, heads * dim], at);
        for window in [None, Some(1), Some(100), Some(129)] {
            let causal = Causal { scale: (*dim as f64).powf(-0.5), window };
            let run = |qkv: &Tensor, dout: &Tensor, is_wide: bool| {
                let ([q, k, v], gradients) = (views(qkv), qkv.zeros_like());
                let [mut dq, mut dk, mut dv] = views(&gradients);
                let forward = if is_wide { composite::attention } else { super::attention };
                let backward =
                    if is_wide { composite::attention_backward } else { super::attention_backward };
                let (out, lse) = forward(&q, &k, &v, &packing, causal).unwrap();
                let (qkv, output) = (Qkv { q: &q, k: &k, v: &v }, AttentionOutput { out: &out, lse: &lse });
                let options = AttentionOptions { packing: &packing, causal, deterministic: true };
                let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
                backward(dout, qkv, output, options, grads).unwrap();
                (out, lse, gradients)
            };
            let what = format!("{heads} heads, {kv_heads} of {dim}, {lengths:?}, {window:?}, {at:?}");
            let [wide_qkv, wide_dout] = [&qkv, &dout].map(|tensor| tensor.to_kind(Kind::Float));
            let ((out, lse, found), again) = (run(&qkv, &dout, false), run(&qkv, &dout, false));
            let (wide_out, wide_lse, expected) = run(&wide_qkv, &wide_dout, true);
            assert!(
                out.equal(&again.0) && lse.equal(&again.1) && found.equal(&again.2),
                "{what}: other bits"
            );
            assert_close(&format!("out, {what}"), &out, &wide_out, tolerance(at.0, 4.0));
            assert_close(&format!("lse, {what}"), &lse, &wide_lse, tolerance(at.0, 1.0));
            for ((name, found), expected) in
                ["dq", "dk", "dv"].iter().zip(views(&found)).zip(views(&expected))
            {
                assert_close(&format!("{name}, {what}"), &found, &expected, tolerance(at.0, 4.0));
            }
            let beside = found.narrow(1, heads + 2 * kv_heads, 1);
            assert!(beside.equal(&beside.zeros_like()), "{what}: written beside its rows");
        }
    }
}

/// A kernel's decoding has the bits of its attention: keys that a query does not see change nothing.
#[test]
fn decoding_equals_the_last_query_of_attention() {
    for ((heads, kv_heads, dim), window) in pairs(&HEADS, WINDOWS) {
        let causal = Causal { scale: 0.3, window };
        let lengths = [13, 1, 16, 40];
        let packing = Packing::new(&lengths, Device::Cpu).unwrap();
        let [q, k, v] =
            [*heads, *kv_heads, *kv_heads].map(|heads| random(&[packing.tokens(), heads, *dim], FLOAT));
        // Blocks of four tokens, dealt out from the last one down.
        let tables = Tensor::from_slice(&(0..40).map(|entry| 44 - entry).collect::<Vec<i64>>()).view([4, 10]);
        let caches = [&k, &v].map(|rows| {
            let cache = Tensor::full([45, 4, *kv_heads, *dim], f64::NAN, FLOAT);
            for (sequence, (&length, offset)) in lengths.iter().zip(packing.offsets()).enumerate() {
                for token in 0..length {
                    let block = tables.int64_value(&[sequence as i64, token / 4]);
                    cache.get(block).get(token % 4).copy_(&rows.get(offset + token));
                }
            }
            cache
        });
        let last = Tensor::from_slice(&packing.offsets()[1..]) - 1;
        let of_last = |(out, _): (Tensor, Tensor)| out.index_select(0, &last);
        let expected = of_last(composite::attention(&q, &k, &v, &packing, causal).unwrap());
        let whole = of_last(super::attention(&q, &k, &v, &packing, causal).unwrap());
        let (q, lengths) = (q.index_select(0, &last), Tensor::from_slice(&lengths));
        let [keys, values] = &caches;
        let kernel = super::decode_attention(&q, keys, values, &tables, &lengths, causal).unwrap();
        let composite = composite::decode_attention(&q, keys, values, &tables, &lengths, causal).unwrap();
        let what = format!("{heads} heads, {kv_heads} of {dim}, {window:?}");
        assert!(kernel.equal(&whole), "{what}: other bits");
        assert_close(&what, &kernel, &expected, KERNEL_TOLERANCE);
        assert_close(&what, &composite, &expected, KERNEL_TOLERANCE);
    }
}

#[test]
fn a_sequence_in_pieces_attends_as_a_whole() {
    let (heads, kv_heads, dim, len) = (6, 2, 20, 23);
    let packing = Packing::new(&[len], Device::Cpu).unwrap();
    let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| random(&[len, heads, dim], FLOAT));
    for (window, (start, rows)) in pairs(&WINDOWS, [(0, 23), (0, 8), (8, 8), (16, 7), (22, 1), (5, 11)]) {
        let causal = Causal { scale: 0.3, window: *window };
        let whole = super::attention(&q, &k, &v, &packing, causal).unwrap().0;
        let [q, whole] = [&q, &whole].map(|all| all.narrow(0, start, rows));
        let [k, v] = [&k, &v].map(|all| all.narrow(0, 0, start + rows));
        let what = format!("{rows} rows from {start}, {window:?}");
        let kernel = super::attention_with_history(&q, &k, &v, causal).unwrap();
        assert!(kernel.equal(&whole), "{what}: other bits");
        let composite = composite::attention_with_history(&q, &k, &v, causal).unwrap();
        assert_close(&what, &composite, &whole, KERNEL_TOLERANCE);
    }
}

#[test]
fn products_by_rows_depend_on_their_row_alone() {
    let on_host = [Kind::BFloat16, Kind::Half].map(|kind| (kind, Device::Cpu));
    let small = [(1, 1), (7, 3), (20, 97), (64, 200), (129, 5)];
    // Of these an H200 cuts the weights in all its ways (`kernels/product.rs`).
    let large = [(1536, 2048), (8960, 1536), (896, 4864), (256, 18944), (64, 104)];
    for (&at, (inner, columns)) in pairs(&PLACES, small).chain(pairs(&on_host, small)) {
        check_product_by_rows(at, [150, inner, columns], 1.0);
    }
    for &at in PLACES.iter().filter(|(_, device)| *device != Device::Cpu) {
        for (inner, columns) in large {
            check_product_by_rows(at, [300, inner, columns], 2.0);
        }
    }
}

fn check_product_by_rows(at: (Kind, Device), [rows, inner, columns]: [i64; 3], roundings: f64) {
    let (x, w, bias) =
        (random(&[rows, inner], at), random(&[columns, inner], at) * 0.1, random(&[columns], at));
    let what = format!("{inner} x {columns}, {at:?}");
    let whole = super::linear_by_rows(&x, &w, Some(&bias)).unwrap();
    let double = |tensor: &Tensor| tensor.to_kind(Kind::Double);
    let expected = double(&x).matmul(&double(&w).tr()) + double(&bias);
    assert_close(&what, &whole, &expected, tolerance(at.0, roundings));
    for (start, count) in [(0, 1), (3, 1), (rows - 1, 1), (0, 8), (60, 9), (64, 64), (1, rows - 1)] {
        let part = super::linear_by_rows(&x.narrow(0, start, count), &w, Some(&bias)).unwrap();
        assert!(part.equal(&whole.narrow(0, start, count)), "{what}: {count} rows from {start}");
    }
    if at.1 != Device::Cpu {
        let mut into = Tensor::empty([5, columns], at);
        super::linear_by_rows_into(&x.narrow(0, 7, 5), &w, Some(&bias), &mut into).unwrap();
        assert!(into.equal(&whole.narrow(0, 7, 5)), "{what}: recorded");
    }
}

/// Packed, behind a history, and over a cache a row has the same bits, which are near those of the plain formula.
#[test]
fn attention_by_rows_depends_on_its_row_alone() {
    for (&at, window) in pairs(&PLACES, [None, Some(1), Some(7), Some(40), Some(300), Some(601)]) {
        let (heads, kv_heads, dim) = (6, 2, 64);
        let lengths = [600i64, 1, 0, 17, 33];
        let packing = Packing::new(&lengths, at.1).unwrap();
        let qkv = random(&[packing.tokens(), heads + 2 * kv_heads, dim], at);
        let [q, k, v] = [(0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)]
            .map(|(start, count)| qkv.narrow(1, start, count));
        let causal = Causal { scale: 0.2, window };
        let (out, lse) = super::attention_by_rows(&q, &k, &v, &packing, causal).unwrap();
        let what = format!("{window:?}, {at:?}");
        let wide = [&q, &k, &v].map(|tensor| tensor.to_kind(Kind::Float));
        let expected = composite::attention(&wide[0], &wide[1], &wide[2], &packing, causal).unwrap();
        assert_close(&what, &out, &expected.0, tolerance(at.0, 4.0).max(1e-5));
        assert_close(&what, &lse, &expected.1, tolerance(at.0, 2.0).max(1e-5));

        let mut begin = 0;
        for length in lengths.into_iter().filter(|&length| length > 0) {
            let of = |tensor: &Tensor, start: i64| tensor.narrow(0, begin + start, length - start);
            let alone = Packing::new(&[length], at.1).unwrap();
            let (keys, values) = (of(&k, 0), of(&v, 0));
            let (by_itself, _) =
                super::attention_by_rows(&of(&q, 0), &keys, &values, &alone, causal).unwrap();
            assert!(by_itself.equal(&of(&out, 0)), "{what}: {length} alone");
            let start = length * 2 / 3;
            let piece =
                super::attention_with_history_by_rows(&of(&q, start), &keys, &values, causal).unwrap();
            assert!(piece.equal(&of(&out, start)), "{what}: the end of {length}");
            // Its last token over blocks in reverse order.
            let blocks = (length + 15) / 16;
            let cache = |rows: &Tensor| {
                let padded = Tensor::zeros([blocks * 16, kv_heads, dim], at);
                padded.narrow(0, 0, length).copy_(rows);
                padded.view([blocks, 16, kv_heads, dim]).flip([0])
            };
            let tables = Tensor::arange(blocks, (Kind::Int64, at.1)).flip([0]).view([1, blocks]);
            let lengths = Tensor::from_slice(&[length]).to_device(at.1);
            let last = super::decode_attention_by_rows(
                &of(&q, length - 1),
                &cache(&keys),
                &cache(&values),
                &tables,
                &lengths,
                causal,
            );
            assert!(last.unwrap().equal(&of(&out, length - 1)), "{what}: the last of {length}");
            begin += length;
        }
    }
}

/// In 16 bits a CPU's attention is that of wide values, rounded once, in every form.
#[test]
fn narrow_attention_on_a_cpu_is_the_wide_one_rounded() {
    for (kind, window) in pairs(&[Kind::BFloat16, Kind::Half], WINDOWS) {
        let (heads, kv_heads, dim, len, causal) = (4, 2, 6, 21, Causal { scale: 0.3, window });
        let packing = Packing::new(&[len], Device::Cpu).unwrap();
        let narrow = |heads| random(&[len, heads, dim], FLOAT).to_kind(*kind);
        let [q, k, v] = [heads, kv_heads, kv_heads].map(narrow);
        let [q_wide, k_wide, v_wide] = [&q, &k, &v].map(|it| it.to_kind(Kind::Float));
        let (out, lse) = super::attention(&q, &k, &v, &packing, causal).unwrap();
        let (wide, lse_wide) = super::attention(&q_wide, &k_wide, &v_wide, &packing, causal).unwrap();
        assert!(out.equal(&wide.to_kind(*kind)) && lse.equal(&lse_wide));
        let pieces = super::attention_with_history(&q.narrow(0, 13, 8), &k, &v, causal).unwrap();
        assert!(pieces.equal(&out.narrow(0, 13, 8)), "{kind:?}, {window:?}: in pieces");
        // One block of all tokens behind one that nobody reads.
        let cache = |rows: &Tensor| Tensor::stack(&[rows.full_like(f64::NAN), rows.shallow_clone()], 0);
        let (table, length) = (Tensor::from_slice(&[1i64]).view([1, 1]), Tensor::from_slice(&[len]));
        let last = q.narrow(0, len - 1, 1);
        let decoded =
            super::decode_attention(&last, &cache(&k), &cache(&v), &table, &length, causal).unwrap();
        assert!(decoded.equal(&out.narrow(0, len - 1, 1)), "{kind:?}, {window:?}: decoded");
    }
}

/// To be called before libtorch's autograd first runs: it looks for GPUs, and keeps what it finds, so that the library for
/// them must have been opened.
pub(super) fn before_autograd() {
    LazyLock::force(&GPU);
}

/// The gradients of `sum(output * doutput)` by libtorch's autograd.
fn autograd(inputs: &[&Tensor], output: &Tensor, doutput: &Tensor) -> Vec<Tensor> {
    before_autograd();
    Tensor::run_backward(&[(output * doutput).sum(None)], inputs, false, false)
}

/// The gradients of `loss` by libtorch's autograd.
pub(super) fn autograd_of(loss: &Tensor, leaves: &[Tensor]) -> Vec<Tensor> {
    before_autograd();
    Tensor::run_backward(&[loss], leaves, false, false)
}

fn leaf(size: &[i64]) -> Tensor {
    random(size, DOUBLE).set_requires_grad(true)
}

#[test]
fn composite_norm_equals_libtorch() {
    let (x, weight, dy) = (leaf(&[9, 3, 12]), leaf(&[12]), random(&[9, 3, 12], DOUBLE));
    let expected = x.rms_norm([12i64].as_slice(), Some(&weight), 1e-5);
    let gradients = autograd(&[&x, &weight], &expected, &dy);
    let _guard = tch::no_grad_guard();
    let (y, rstd) = composite::rms_norm(&x, &weight, 1e-5).unwrap();
    let (mut to_y, mut dx, mut dweight) = (dy.copy(), x.detach().ones_like(), weight.detach().zeros_like());
    composite::rms_norm_backward_(&mut to_y, &x, &rstd, &weight, &mut dx, &mut dweight, Store::Write)
        .unwrap();
    for (what, found, expected) in [
        ("y", &y, &expected),
        ("y again", &to_y, &expected),
        ("dx", &dx, &(&gradients[0] + 1.0)),
        ("dweight", &dweight, &gradients[1]),
    ] {
        assert_close(what, found, expected, 1e-12);
    }
}

#[test]
fn composite_glus_equal_libtorch() {
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let (gate_up, dy) = (leaf(&[9, 14]), random(&[9, 7], DOUBLE));
        let gate = gate_up.narrow(1, 0, 7);
        let gate = if activation == Activation::Silu { gate.silu() } else { gate.gelu("tanh") };
        let expected = gate * gate_up.narrow(1, 7, 7);
        let gradients = autograd(&[&gate_up], &expected, &dy);
        let _guard = tch::no_grad_guard();
        assert_close("y", &composite::glu(&gate_up, activation).unwrap(), &expected, 1e-12);
        let (mut gate_up, mut dy) = (gate_up.detach().copy(), dy);
        composite::glu_backward_(&mut gate_up, &mut dy, activation).unwrap();
        assert_close("dgate_up", &gate_up, &gradients[0], 1e-12);
        assert_close("y again", &dy, &expected, 1e-12);
    }
}

#[test]
fn composite_attention_equals_libtorch() {
    let (heads, kv_heads, dim, lengths) = (4, 2, 6, [5, 1, 12]);
    let packing = Packing::new(&lengths, Device::Cpu).unwrap();
    let rows = packing.tokens();
    let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| leaf(&[rows, heads, dim]));
    let dout = random(&[rows, heads * dim], DOUBLE);
    for window in [None, Some(1), Some(4), Some(30)] {
        let sequences: Vec<Tensor> = (0..3)
            .map(|sequence| {
                let (start, len) = (packing.offsets()[sequence], lengths[sequence]);
                let cut = |x: &Tensor| x.narrow(0, start, len).transpose(0, 1).unsqueeze(0);
                let (q, k, v) = (cut(&q), cut(&k), cut(&v));
                let ones = Tensor::ones([len, len], (Kind::Bool, Device::Cpu)).tril(0);
                let seen = ones.triu(1 - window.unwrap_or(len));
                let out =
                    Tensor::scaled_dot_product_attention(&q, &k, &v, Some(&seen), 0.0, false, 0.3, true);
                out.squeeze_dim(0).transpose(0, 1).flatten(1, 2)
            })
            .collect();
        let expected = Tensor::cat(&sequences, 0);
        let gradients = autograd(&[&q, &k, &v], &expected, &dout);
        let _guard = tch::no_grad_guard();
        let causal = Causal { scale: 0.3, window };
        let (out, lse) = composite::attention(&q, &k, &v, &packing, causal).unwrap();
        let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| x.detach().zeros_like());
        let (qkv, output) = (Qkv { q: &q, k: &k, v: &v }, AttentionOutput { out: &out, lse: &lse });
        let options = AttentionOptions { packing: &packing, causal, deterministic: true };
        let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        composite::attention_backward(&dout, qkv, output, options, grads).unwrap();
        assert_close("out", &out, &expected, 1e-12);
        for (what, found, expected) in
            [("dq", dq, &gradients[0]), ("dk", dk, &gradients[1]), ("dv", dv, &gradients[2])]
        {
            assert_close(&format!("{what}, {window:?}"), &found, expected, 1e-12);
        }
    }
}

#[test]
fn composite_logprobs_equal_libtorch() {
    let (logits, targets) = (leaf(&[8, 11]), Tensor::from_slice(&[0i64, 10, 3, 3, 5, 1, 2, 9]));
    let [dlogprobs, dentropy] = [random(&[8], DOUBLE), random(&[8], DOUBLE) * 2.0];
    let log_p = (&logits / 0.7).log_softmax(-1, None);
    let expected = log_p.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1);
    let entropy = -(log_p.exp() * &log_p).sum_dim_intlist([1i64].as_slice(), false, None);
    let both = Tensor::cat(&[&expected, &entropy], 0);
    let gradients = autograd(&[&logits], &both, &Tensor::cat(&[&dlogprobs, &dentropy], 0));
    let _guard = tch::no_grad_guard();
    let scores = composite::logprobs(&logits, &targets, 0.7).unwrap();
    assert_close("logprobs", &scores.logprobs, &expected, 1e-12);
    assert_close("entropy", &scores.entropy, &entropy, 1e-12);
    let (mut logits, saved) = (logits.detach().copy(), (&scores.lse, &scores.entropy));
    composite::logprobs_backward_(&mut logits, &targets, 0.7, saved, &dlogprobs, Some(&dentropy)).unwrap();
    assert_close("dlogits", &logits, &gradients[0], 1e-12);
}

#[test]
fn rotation_keeps_lengths_and_turns_back() {
    let positions = Tensor::from_slice(&[0i64, 1, 900, 7]);
    let table = rope_table(1000, 12, 10_000.0);
    let x = random(&[4, 2, 12], FLOAT);
    let mut turned = x.copy();
    super::rope_(&mut turned, &positions, &table, Rotation::Forward).unwrap();
    let lengths = |x: &Tensor| x.square().sum_dim_intlist([2i64].as_slice(), false, None);
    assert_close("position 0", &turned.get(0), &x.get(0), 0.0);
    assert_close("lengths", &lengths(&turned), &lengths(&x), 1e-6);
    // The first pair turns by the position itself.
    let (first, second) = (x.double_value(&[2, 1, 0]), x.double_value(&[2, 1, 6]));
    let expected = first * 900f64.cos() - second * 900f64.sin();
    assert!((turned.double_value(&[2, 1, 0]) - expected).abs() < 1e-6);
    super::rope_(&mut turned, &positions, &table, Rotation::Inverse).unwrap();
    assert_close("back", &turned, &x, 1e-6);
    // Of wider heads the first elements are turned as if they were all.
    let wider = random(&[4, 2, 16], FLOAT);
    let (mut first, mut partly) = (wider.narrow(2, 0, 12).contiguous(), wider.copy());
    super::rope_(&mut first, &positions, &table, Rotation::Forward).unwrap();
    super::rope_(&mut partly, &positions, &table, Rotation::Forward).unwrap();
    let expected = Tensor::cat(&[first, wider.narrow(2, 12, 4)], 2);
    assert_close("the first 12 of 16", &partly, &expected, 0.0);
}

#[test]
fn kernels_do_not_depend_on_the_number_of_threads() {
    let (heads, dim, vocab) = (4, 16, 50);
    let packing = Packing::new(&[40; 100], Device::Cpu).unwrap();
    let rows = packing.tokens();
    let run = |threads: i32| {
        tch::set_num_threads(threads);
        let (mut x, weight) = (random(&[rows, heads * dim], FLOAT), random(&[heads * dim], FLOAT));
        let residual = &x * 0.5;
        let (y, rstd) = super::add_rms_norm_(&mut x, &residual, &weight, 1e-5).unwrap();
        let (mut dy, mut dx, mut dweight) = (y.copy(), x.zeros_like(), weight.zeros_like());
        super::rms_norm_backward_(&mut dy, &x, &rstd, &weight, &mut dx, &mut dweight, Store::Write).unwrap();
        let (q, causal) = (y.view([rows, heads, dim]), Causal::whole(0.25));
        let (out, lse) = super::attention(&q, &q, &q, &packing, causal).unwrap();
        let [mut dq, mut dk, mut dv] = [0; 3].map(|_| q.zeros_like());
        let (qkv, output) = (Qkv { q: &q, k: &q, v: &q }, AttentionOutput { out: &out, lse: &lse });
        let options = AttentionOptions { packing: &packing, causal, deterministic: true };
        let grads = QkvGrads { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        super::attention_backward(&y, qkv, output, options, grads).unwrap();
        let mut sums = weight.zeros_like();
        super::sum_rows(&dq.view([rows, heads * dim]), &mut sums, Store::Write).unwrap();
        let mut dembedding = random(&[40, heads * dim], FLOAT);
        super::embedding_backward(&dx, packing.positions(), &mut dembedding, Store::Add).unwrap();
        let mut gate_up = out.copy();
        let activated = super::glu(&gate_up, Activation::Silu).unwrap();
        super::glu_backward_(&mut gate_up, &mut activated.copy(), Activation::Silu).unwrap();
        let mut logits = random(&[rows, vocab], FLOAT);
        let scores = super::logprobs(&logits, packing.positions(), 1.0).unwrap();
        let saved = (&scores.lse, &scores.entropy);
        super::logprobs_backward_(&mut logits, packing.positions(), 1.0, saved, &scores.lse, None).unwrap();
        vec![dy, dx, dweight, out, lse, dq, dk, dv, sums, dembedding, gate_up, logits, scores.entropy]
    };
    let (one, two) = (run(1), run(2));
    for (index, (one, two)) in one.iter().zip(&two).enumerate() {
        assert!(one.equal(two), "tensor {index}");
    }
}

#[test]
fn bfloat16_composites_sum_in_float() {
    let (x, weight) = (random(&[30, 200], FLOAT), random(&[200], FLOAT));
    let narrow = |x: &Tensor| x.to_kind(Kind::BFloat16);
    let (y, rstd) = super::rms_norm(&narrow(&x), &narrow(&weight), 1e-5).unwrap();
    assert_eq!((y.kind(), rstd.kind()), (Kind::BFloat16, Kind::Float));
    let expected = composite::rms_norm(&x, &weight, 1e-5).unwrap();
    assert_close("y", &y, &expected.0, 1e-2);
    let targets = Tensor::zeros([30], (Kind::Int64, Device::Cpu));
    let found = super::logprobs(&narrow(&x), &targets, 1.0).unwrap();
    assert_eq!(found.logprobs.kind(), Kind::Float);
    assert_close(
        "logprobs",
        &found.logprobs,
        &composite::logprobs(&x, &targets, 1.0).unwrap().logprobs,
        1e-2,
    );
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let check = |expected: &str, result: super::Result<()>| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    let (x, positions) = (random(&[6, 2, 4], FLOAT), Tensor::from_slice(&[0i64, 1, 2, 0, 1, 9]));
    let table = rope_table(8, 4, 100.0);
    let rope = |x: &Tensor, positions: &Tensor| {
        super::rope_(&mut x.shallow_clone(), positions, &table, Rotation::Forward)
    };
    check("`positions` holds 9, outside of 0..8", rope(&x, &positions));
    check("`positions` has shape [5]", rope(&x, &positions.narrow(0, 0, 5)));
    let positions = positions.remainder(8);
    check("dense rows", rope(&x.transpose(0, 1).contiguous().transpose(0, 1), &positions));
    check("`table` turns 4 elements, of heads of 2", rope(&random(&[6, 2, 2], FLOAT), &positions));

    let packing = Packing::new(&[2, 3], Device::Cpu).unwrap();
    let attention =
        |q: &Tensor, k: &Tensor| super::attention(q, k, k, &packing, Causal::whole(1.0)).map(drop);
    check("has 5 rows, expected 6", attention(&x, &x));
    let x = x.narrow(0, 0, 5);
    check("3 heads, which do not divide the 2", attention(&x, &random(&[5, 3, 4], FLOAT)));
    check("expected Float on Cpu", attention(&x, &random(&[5, 1, 4], DOUBLE)));
    check("expected [5, 1, 4]", attention(&x, &random(&[5, 1, 6], FLOAT)));
    check("lengths", Packing::new(&[1, -1], Device::Cpu).map(drop));
    let sharing = |rows: &[i64]| Packing::sharing(&[2, 3], rows, Device::Cpu).map(drop);
    check("`rows` are 4, of 5 tokens", sharing(&[0, 1, 0, 2]));
    check("`rows` hold 1 behind 2, in sequence 1", sharing(&[0, 1, 0, 2, 1]));
    check("`rows` hold 3 where at most 2", sharing(&[0, 1, 0, 3, 4]));

    let (logits, targets) = (random(&[3, 5], FLOAT), Tensor::from_slice(&[0i64, -1, 2]));
    check("`targets` holds -1", super::logprobs(&logits, &targets, 1.0).map(drop));
    check("is not contiguous", super::logprobs(&logits.tr(), &Tensor::from_slice(&[0i64; 5]), 1.0).map(drop));
    let weight = random(&[4], FLOAT);
    check("`weight` has shape [4], expected [5]", super::rms_norm(&logits, &weight, 1e-5).map(drop));
}

fn rope_table(positions: i64, dim: i64, theta: f64) -> Tensor {
    super::rope_table(positions, &super::rope_frequencies(dim, theta), 1.0, Device::Cpu).unwrap()
}
