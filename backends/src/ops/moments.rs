//! AdamW's moments in 8 bits, in blocks of 256 (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").
//!
//! A block is divided by its scale, and each quotient becomes the nearest value of a map with 256 values, which lie ever
//! closer together towards zero: bitsandbytes' dynamic maps. Two things differ from bitsandbytes, each for a reason:
//!
//! - The scale of a first moment is the value farthest from zero with its sign, so that this value is exact, also if it
//!   is below zero. Moments that are read and written again then keep their bits, as a checkpoint needs.
//! - A second moment above zero does not become zero, or a first moment beside it would be divided by `eps` alone.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::{
    AdamW, Result, adamw_,
    check::{Args, Engine},
};
use crate::kernels;

/// Elements that share a scale.
pub const MOMENT_BLOCK: i64 = 256;
/// Elements that are widened at a time where no kernel does it in place; a multiple of [`MOMENT_BLOCK`].
const CHUNK: i64 = 1 << 20;
/// Values of a map.
const VALUES: usize = 256;
/// Powers of ten between the largest and the smallest values of a map.
const EXPONENTS: i32 = 7;

/// Maps of both moments on a device: of each the values in ascending order, and the bounds between neighbours, of which the
/// last is infinite. fp32 `[2, 2, 256]`.
#[derive(Debug)]
pub struct MomentMaps(Tensor);

impl MomentMaps {
    /// Returns the maps on `device`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn on(device: Device) -> Result<MomentMaps> {
        let mut all = Vec::with_capacity(4 * VALUES);
        for is_signed in [true, false] {
            let values = map(is_signed);
            let mut bounds: Vec<f32> = values.windows(2).map(|pair| 0.5 * (pair[0] + pair[1])).collect();
            if !is_signed {
                bounds[0] = 0.0; // what is above zero becomes at least the next value
            }
            bounds.push(f32::INFINITY);
            all.extend(values.into_iter().chain(bounds));
        }
        let size = [2, 2, VALUES as i64];
        Ok(MomentMaps(Tensor::f_from_slice(&all)?.f_view(size)?.f_to_device(device)?))
    }

    /// Returns views of the same memory.
    pub fn shallow_clone(&self) -> MomentMaps {
        MomentMaps(self.0.shallow_clone())
    }

    /// The values of a moment's map, or their bounds.
    fn part(&self, moment: usize, part: i64) -> Result<Tensor> {
        Ok(self.0.f_select(0, moment as i64)?.f_select(0, part)?)
    }
}

/// The dynamic map of `create_dynamic_map(signed, 7, 8)` in bitsandbytes: each power of ten has twice as many values as the one
/// below it, the means of equal parts of its upper nine tenths.
fn map(is_signed: bool) -> Vec<f32> {
    let mut values = vec![0.0, 1.0];
    for exponent in 0..EXPONENTS {
        let parts = 1 << (exponent + i32::from(!is_signed));
        let power = 10f64.powi(exponent + 1 - EXPONENTS);
        for part in 0..parts {
            let mean = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
            values.push((power * mean) as f32);
            values.extend(is_signed.then_some((-power * mean) as f32));
        }
    }
    values.sort_by(f32::total_cmp);
    values
}

/// Both moments of a row of N elements in 8 bits, as views of memory of the caller's.
#[derive(Debug)]
pub struct EightBitMoments {
    /// Indices in the maps, uint8 `[N]` each.
    pub codes: [Tensor; 2],
    /// fp32 `[ceil(N / 256)]` each.
    pub scales: [Tensor; 2],
}

impl EightBitMoments {
    /// Returns the number of scales of a moment of `len` elements.
    pub fn scales(len: usize) -> usize {
        len.div_ceil(MOMENT_BLOCK as usize)
    }

    /// Returns the moment with index `moment` (0 or 1), fp32 `[N]`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn values(&self, moment: usize, maps: &MomentMaps) -> Result<Tensor> {
        let codes = &self.codes[moment];
        let wide = maps.part(moment, 0)?.f_index_select(0, &codes.f_to_kind(Kind::Int)?)?;
        let wide = in_blocks(&wide)?.f_mul(&self.scales[moment].f_unsqueeze(1)?)?;
        Ok(wide.f_view([-1])?.f_narrow(0, 0, codes.numel() as i64)?)
    }

    /// Rounds `values`, fp32 `[N]`, to the moment with index `moment`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn set(&mut self, moment: usize, values: &Tensor, maps: &MomentMaps) -> Result<()> {
        let blocks = in_blocks(values)?;
        let [low, high] = [blocks.f_amin([1i64].as_slice(), true)?, blocks.f_amax([1i64].as_slice(), true)?];
        let scales = high.f_where_self(&high.f_ge_tensor(&low.f_neg()?)?, &low)?;
        let quotients = blocks.f_div(&scales.f_masked_fill(&scales.f_eq(0.0)?, 1.0)?)?;
        let bounds = maps.part(moment, 1)?.f_narrow(0, 0, VALUES as i64 - 1)?;
        let codes = quotients.f_bucketize(&bounds, true, false)?.f_view([-1])?;
        self.codes[moment].f_copy_(&codes.f_narrow(0, 0, values.numel() as i64)?)?;
        self.scales[moment].f_copy_(&scales.f_squeeze_dim(1)?)?;
        Ok(())
    }

    /// Returns row `index` of rows of `len` elements, each of which has scales of its own.
    ///
    /// # Errors
    /// libtorch's.
    pub fn row(&self, index: usize, len: usize) -> Result<EightBitMoments> {
        let first_scale = index * EightBitMoments::scales(len);
        self.narrow((index * len) as i64, first_scale as i64, len as i64)
    }

    /// Returns views of the same memory.
    pub fn shallow_clone(&self) -> EightBitMoments {
        let clone = |all: &[Tensor; 2]| all.each_ref().map(Tensor::shallow_clone);
        EightBitMoments { codes: clone(&self.codes), scales: clone(&self.scales) }
    }

    /// The `len` elements from `start`, with the scales from `first_scale`.
    fn narrow(&self, start: i64, first_scale: i64, len: i64) -> Result<EightBitMoments> {
        let ([m, v], [of_m, of_v]) = (&self.codes, &self.scales);
        let codes = |all: &Tensor| all.f_narrow(0, start, len);
        let scales = |all: &Tensor| all.f_narrow(0, first_scale, (len + MOMENT_BLOCK - 1) / MOMENT_BLOCK);
        Ok(EightBitMoments { codes: [codes(m)?, codes(v)?], scales: [scales(of_m)?, scales(of_v)?] })
    }
}

/// Returns values `[N]` as `[ceil(N / 256), 256]`, behind them zeros.
fn in_blocks(values: &Tensor) -> Result<Tensor> {
    let missing = -(values.numel() as i64) & (MOMENT_BLOCK - 1);
    let whole = if missing > 0 { values.f_constant_pad_nd([0, missing])? } else { values.shallow_clone() };
    Ok(whole.f_view([-1, MOMENT_BLOCK])?)
}

/// Elements with and without weight decay in turn, which cover a row.
#[derive(Debug)]
pub struct DecayRuns {
    runs: Vec<(Range<usize>, bool)>,
    /// The runs' ends and their decays, int64 `[2, R]`, for the kernel.
    on_device: Tensor,
}

impl DecayRuns {
    /// Takes the runs of a row whose moments are on `device`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn new(runs: Vec<(Range<usize>, bool)>, device: Device) -> Result<DecayRuns> {
        let ends = runs.iter().map(|(run, _)| run.end as i64);
        let all: Vec<i64> = ends.chain(runs.iter().map(|(_, decays)| i64::from(*decays))).collect();
        let on_device = Tensor::f_from_slice(&all)?.f_view([2, runs.len() as i64])?.f_to_device(device)?;
        Ok(DecayRuns { runs, on_device })
    }
}

/// One step of [`adamw_`] with moments in 8 bits, which are widened, updated and rounded again. The moments of this step are
/// those of before it was rounded. `gradient` is fp32. The weight decay of `adamw` is for the runs that decay.
///
/// # Errors
/// The errors of [`adamw_`].
pub fn adamw_in_eight_bits_(
    weights: &mut Tensor,
    moments: &mut EightBitMoments,
    gradient: &Tensor,
    factors: &Tensor,
    runs: &DecayRuns,
    adamw: &AdamW,
    maps: &MomentMaps,
) -> Result<()> {
    let len = weights.numel() as i64;
    let (args, is_fp32) = (Args::new("adamw_in_eight_bits", weights), weights.kind() == Kind::Float);
    if let Some(Engine::Device(device)) = Engine::of(weights).filter(|_| is_fp32) {
        let scales = (len + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
        let mut states = [args.floats("weights", weights, &[len])?.cast(); 5];
        for (index, (codes, of_blocks)) in moments.codes.iter().zip(&moments.scales).enumerate() {
            states[1 + index] = args.dense("codes", codes, &[len], Kind::Uint8)?;
            states[3 + index] = args.floats("scales", of_blocks, &[scales])?.cast();
        }
        let count = runs.runs.len() as i64;
        let inputs = kernels::strategy::EightBitInputs {
            gradient: args.floats("gradient", gradient, &[len])?.cast(),
            factors: args.floats("factors", factors, &[3])?.cast(),
            maps: args.floats("maps", &maps.0, &[2, 2, VALUES as i64])?.cast(),
            runs: args.dense("runs", &runs.on_device, &[2, count], Kind::Int64)?,
            count: count as i32,
        };
        // SAFETY: the sizes of all tensors were checked; states are borrowed mutably, and libtorch takes memory back in its
        // stream's order.
        return args.launched(unsafe {
            kernels::strategy::adamw_in_eight_bits(&*device, states, &inputs, len, adamw.numbers())
        });
    }
    for start in (0..len).step_by(CHUNK as usize) {
        let count = CHUNK.min(len - start);
        let mut part = moments.narrow(start, start / MOMENT_BLOCK, count)?;
        let mut wide = [part.values(0, maps)?, part.values(1, maps)?];
        for (run, decays) in &runs.runs {
            let [begin, end] = [run.start as i64, run.end as i64].map(|at| at.clamp(start, start + count));
            let of_run = |tensor: &Tensor, from: i64| tensor.f_narrow(0, begin - from, end - begin);
            let adamw = AdamW { weight_decay: if *decays { adamw.weight_decay } else { 0.0 }, ..*adamw };
            let [mut m, mut v] = [of_run(&wide[0], start)?, of_run(&wide[1], start)?];
            adamw_(&mut of_run(weights, 0)?, &mut m, &mut v, &of_run(gradient, 0)?, factors, &adamw)?;
        }
        for (moment, values) in wide.iter_mut().enumerate() {
            part.set(moment, values, maps)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        BackendKind,
        testing::{adamw_one, first_of},
    };

    const HYPER: AdamW = AdamW { learning_rate: 1e-2, betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1 };

    fn row(len: i64, device: Device) -> EightBitMoments {
        let zeros = |len, kind| Tensor::zeros([len], (kind, device));
        let blocks = EightBitMoments::scales(len as usize) as i64;
        EightBitMoments {
            codes: [0; 2].map(|_| zeros(len, Kind::Uint8)),
            scales: [0; 2].map(|_| zeros(blocks, Kind::Float)),
        }
    }

    fn doubles(of: &Tensor) -> Vec<f64> {
        Vec::try_from(of.to_kind(Kind::Double)).unwrap()
    }

    /// Some values of a map, by index, and the sum of all.
    struct Golden {
        is_signed: bool,
        some: [(usize, f64); 5],
        sum: f64,
    }

    const GOLDEN: [Golden; 2] = [
        Golden {
            is_signed: true,
            some: [
                (0, -0.992_968_738),
                (100, -0.007_468_749_77),
                (128, 5.5e-7),
                (200, 0.233_593_747),
                (255, 1.0),
            ],
            sum: 1.0,
        },
        Golden {
            is_signed: false,
            some: [
                (1, 3.25e-7),
                (2, 7.75e-7),
                (100, 0.062_734_380),
                (200, 0.616_796_851),
                (254, 0.996_484_399),
            ],
            sum: 75.105_263_243,
        },
    ];

    /// Values of many magnitudes in a block, and blocks of many magnitudes; one block is zero.
    fn spread(len: i64) -> Tensor {
        let magnitudes = Tensor::rand([len], (Kind::Float, Device::Cpu)) * -8.0;
        let values = Tensor::randn([len], (Kind::Float, Device::Cpu)) * magnitudes.exp2();
        let of_blocks = Tensor::arange(len, (Kind::Float, Device::Cpu)).floor_divide_scalar(256.0);
        let zero = of_blocks.eq(1.0);
        (values * of_blocks.neg().exp2()).masked_fill(&zero, 0.0)
    }

    /// `create_dynamic_map(signed=True)` and `(signed=False)` of bitsandbytes 0.50.2: some of the values, and the sum of all.
    #[test]
    fn maps_are_those_of_bitsandbytes() {
        let near = |found: f32, expected: f64| {
            assert!((f64::from(found) - expected).abs() <= 1e-6 * expected.abs(), "{found}, not {expected}");
        };
        for Golden { is_signed, some, sum } in GOLDEN {
            let values = map(is_signed);
            assert_eq!(values.len(), VALUES);
            assert!(values.windows(2).all(|pair| pair[0] < pair[1]));
            some.iter().for_each(|&(index, expected)| near(values[index], expected));
            let total: f64 = values.iter().map(|&value| f64::from(value)).sum();
            assert!((total - sum).abs() < 1e-4, "{total}, not {sum}");
        }
    }

    /// By arithmetic on fp64: the nearest value of the map times the scale, which is the value farthest from zero.
    #[test]
    fn moments_are_the_nearest_values_of_their_maps() {
        let maps = MomentMaps::on(Device::Cpu).unwrap();
        for len in [1, 255, 256, 257, 1000, 2048] {
            for (moment, given) in [spread(len), spread(len).square()].into_iter().enumerate() {
                let mut moments = row(len, Device::Cpu);
                moments.set(moment, &given, &maps).unwrap();
                let found = doubles(&moments.values(moment, &maps).unwrap());
                let map: Vec<f64> = map(moment == 0).into_iter().map(f64::from).collect();
                for (given, found) in doubles(&given).chunks(256).zip(found.chunks(256)) {
                    let scale =
                        given.iter().fold(0.0, |far: f64, &x| if x.abs() > far.abs() { x } else { far });
                    let found_scale =
                        found.iter().fold(0.0, |far: f64, &x| if x.abs() > far.abs() { x } else { far });
                    assert_eq!(scale, found_scale, "the scale is exact");
                    for (&given, &found) in given.iter().zip(found) {
                        let allowed = map.iter().filter(|&&it| moment == 0 || it > 0.0 || given == 0.0);
                        let least =
                            allowed.map(|it| (it * scale - given).abs()).fold(f64::INFINITY, f64::min);
                        let error = (found - given).abs();
                        assert!(error <= least + 1e-6 * scale.abs(), "{given} is {found} of {len}");
                        assert!(moment == 0 || (given > 0.0) == (found > 0.0), "{given} is {found}");
                    }
                }
            }
        }
    }

    #[test]
    fn moments_that_are_read_and_written_keep_their_bits() {
        let maps = MomentMaps::on(Device::Cpu).unwrap();
        let (mut first, mut again) = (row(5000, Device::Cpu), row(5000, Device::Cpu));
        for (moment, given) in [spread(5000), spread(5000).square()].into_iter().enumerate() {
            first.set(moment, &given, &maps).unwrap();
            again.set(moment, &first.values(moment, &maps).unwrap(), &maps).unwrap();
            assert!(first.codes[moment].equal(&again.codes[moment]));
            assert!(first.scales[moment].equal(&again.scales[moment]));
        }
    }

    /// A row's runs of weight decay: the second does not decay.
    fn runs_of(len: usize) -> Vec<(Range<usize>, bool)> {
        let ends = [0, len / 3, len / 2, len];
        (0..3).map(|index| (ends[index]..ends[index + 1], index != 1)).collect()
    }

    /// Gradients of a step; in step 0 the weights.
    fn values(len: i64, step: i32) -> Tensor {
        let angles = (Tensor::arange(len, (Kind::Float, Device::Cpu)) + i64::from(step) * 7) * 1.7;
        angles.sin() * (angles * 0.3).sin().exp()
    }

    const STEPS: std::ops::RangeInclusive<i32> = 1..=4;
    const SCALE: f32 = 0.37;

    /// Weights after each step on a device, with a step that is not finite after each.
    fn steps_on(device: Device, len: i64) -> Vec<Tensor> {
        let at = |tensor: &Tensor| tensor.to_device(device);
        let (maps, runs) =
            (MomentMaps::on(device).unwrap(), DecayRuns::new(runs_of(len as usize), device).unwrap());
        let (mut weights, mut moments) = (at(&values(len, 0)), row(len, device));
        STEPS
            .map(|step| {
                for scale in [SCALE, f32::NAN] {
                    let factors = HYPER.factors(&at(&Tensor::from(scale)), &at(&Tensor::from(step))).unwrap();
                    let gradient = at(&values(len, step));
                    let state = (&mut weights, &mut moments);
                    adamw_in_eight_bits_(state.0, state.1, &gradient, &factors, &runs, &HYPER, &maps)
                        .unwrap();
                }
                weights.to_device(Device::Cpu).copy()
            })
            .collect()
    }

    /// The same by the host's formula, one element at a time.
    fn steps_of_host(len: i64) -> Vec<Tensor> {
        let floats = |tensor: &Tensor| Vec::<f32>::try_from(tensor).unwrap();
        let (maps, mut moments) = (MomentMaps::on(Device::Cpu).unwrap(), row(len, Device::Cpu));
        let mut weights = floats(&values(len, 0));
        STEPS
            .map(|step| {
                let mut both = [0, 1].map(|moment| floats(&moments.values(moment, &maps).unwrap()));
                let gradient = floats(&values(len, step));
                for (run, decays) in runs_of(len as usize) {
                    let hyper =
                        AdamW { weight_decay: if decays { HYPER.weight_decay } else { 0.0 }, ..HYPER };
                    for index in run {
                        let state = [weights[index], both[0][index], both[1][index]];
                        let [w, m, v] = adamw_one(state, gradient[index] * SCALE, &hyper, step);
                        (weights[index], both[0][index], both[1][index]) = (w, m, v);
                    }
                }
                for (moment, values) in both.iter().enumerate() {
                    moments.set(moment, &Tensor::from_slice(values), &maps).unwrap();
                }
                Tensor::from_slice(&weights)
            })
            .collect()
    }

    /// By arithmetic on fp64 from the rounded moments: the update is that of AdamW, with and without decay.
    #[test]
    fn a_step_is_that_of_adamw_with_rounded_moments() {
        let (len, device) = (700, Device::Cpu);
        let maps = MomentMaps::on(device).unwrap();
        let runs = DecayRuns::new(vec![(0..300, true), (300..700, false)], device).unwrap();
        let (mut weights, mut moments) = (Tensor::randn([len], (Kind::Float, device)), row(len, device));
        for step in 1..=5 {
            let gradient = spread(len);
            let before = [0, 1].map(|moment| doubles(&moments.values(moment, &maps).unwrap()));
            let old = doubles(&weights);
            let factors = HYPER.factors(&Tensor::from(0.5f32), &Tensor::from(step)).unwrap();
            adamw_in_eight_bits_(&mut weights, &mut moments, &gradient, &factors, &runs, &HYPER, &maps)
                .unwrap();
            for (index, (new, g)) in doubles(&weights).into_iter().zip(doubles(&gradient)).enumerate() {
                let g = g * 0.5;
                let (m, v) = (0.9 * before[0][index] + 0.1 * g, 0.95 * before[1][index] + 0.05 * g * g);
                let root = (v / (1.0 - 0.95f64.powi(step))).sqrt() + 1e-8;
                let keep = if index < 300 { 1.0 - 1e-2 * 0.1 } else { 1.0 };
                let expected = keep * old[index] - 1e-2 * m / (1.0 - 0.9f64.powi(step)) / root;
                assert!((new - expected).abs() <= 2e-5, "{index} in step {step}: {new}, not {expected}");
            }
        }
    }

    #[test]
    fn a_step_that_is_not_finite_leaves_no_trace() {
        for len in [1, 300, (1 << 20) + 77] {
            for (host, here) in steps_of_host(len).iter().zip(steps_on(Device::Cpu, len)) {
                let apart = (host - here).abs().max().double_value(&[]);
                assert!(apart < 1e-3, "{apart} of {len} elements");
            }
        }
    }

    #[test]
    fn a_device_has_the_bits_of_the_host() {
        let Some(_open) = first_of(BackendKind::CUDA) else { return };
        for len in [1, 255, 256, 5000, (1 << 21) + 77] {
            let (host, device) = (steps_of_host(len), steps_on(Device::Cuda(0), len));
            assert!(host.iter().zip(&device).all(|(host, device)| host.equal(device)), "{len} elements");
        }
    }
}
