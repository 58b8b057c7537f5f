//! The moments of the elements that a rank steps, in fp32 or in blocks of 8 bits.

use std::ops::Range;

use anyroll_backends::{
    DType,
    ops::{self, DecayRuns, EightBitMoments, MomentMaps},
};
use tch::{Device, Kind, Tensor};

use crate::{AdamW, Decays, Moments, Result, layout::Layout, memory::flat, offload_arena::OffloadArena};

/// Index of the first moment, the mean of gradients.
pub(crate) const EXP_AVG: usize = 0;
/// Index of the second moment, the mean of their squares.
pub(crate) const EXP_AVG_SQ: usize = 1;

/// The numbers of a step that are the same for every unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepHyper {
    pub(crate) adamw: AdamW,
    pub(crate) learning_rate: f64,
}

/// Moments end at multiples of this in their memory, so that fp32 values behind them are aligned.
const ALIGN_BYTES: usize = 256;

/// Returns the bytes of both moments of `len` elements of a unit.
pub(crate) fn bytes(moments: Moments, layout: &Layout, len: usize) -> usize {
    match moments {
        Moments::Fp32 => 2 * len * DType::F32.size_bytes(),
        Moments::EightBit => {
            (2 * len + 2 * scales(layout, len) * size_of::<f32>()).next_multiple_of(ALIGN_BYTES)
        }
    }
}

/// Returns the number of scales of a moment. Blocks begin anew at each slice, so that they are the same at every stage.
fn scales(layout: &Layout, len: usize) -> usize {
    slices(layout, len) * EightBitMoments::scales(layout.slice_len())
}

/// Returns the number of slices of `len` elements of a unit; a unit without parameters has none.
fn slices(layout: &Layout, len: usize) -> usize {
    len.checked_div(layout.slice_len()).unwrap_or(0)
}

/// Both moments of the elements that a rank steps.
#[derive(Debug)]
pub(crate) enum MomentState {
    /// fp32 `[N]` each, and the runs of equal weight decay.
    Fp32 {
        moments: [Tensor; 2],
        runs: Vec<(Range<usize>, bool)>,
    },
    EightBit(Rounded),
}

/// Moments in 8 bits: a row for each slice of the unit.
#[derive(Debug)]
pub(crate) struct Rounded {
    rows: Vec<Row>,
    row_len: usize,
    maps: MomentMaps,
}

/// Moments of a slice, with the runs of weight decay in it: of matrices alone, and of all weights.
#[derive(Debug)]
struct Row {
    moments: EightBitMoments,
    of_matrices: DecayRuns,
    of_all: DecayRuns,
}

/// Some slices of a moment in 8 bits.
#[derive(Debug)]
pub(crate) struct RoundedPart {
    moment: usize,
    rows: Vec<EightBitMoments>,
    maps: MomentMaps,
}

impl MomentState {
    /// Takes moments of the elements `range` of a unit from the start of `memory`, which is zero, or from the host.
    pub(crate) fn new(
        moments: Moments,
        layout: &Layout,
        range: &Range<usize>,
        memory: Option<&OffloadArena>,
    ) -> Result<MomentState> {
        let len = range.len();
        let zeros = |start: usize, count: usize, dtype: DType| match memory {
            Some(memory) => flat(&memory.buffer(start..start + count, dtype)),
            None => {
                let kind = if dtype == DType::U8 { Kind::Uint8 } else { Kind::Float };
                Ok(Tensor::f_zeros([count as i64], (kind, Device::Cpu))?)
            }
        };
        if moments == Moments::Fp32 {
            let moments = [zeros(0, len, DType::F32)?, zeros(len, len, DType::F32)?];
            return Ok(Self::Fp32 { moments, runs: layout.decay_runs(range) });
        }
        let (count, behind) = (scales(layout, len), 2 * len / size_of::<f32>());
        let codes = [zeros(0, len, DType::U8)?, zeros(len, len, DType::U8)?];
        let scales = [zeros(behind, count, DType::F32)?, zeros(behind + count, count, DType::F32)?];
        Ok(Self::EightBit(Rounded::new(layout, range, &EightBitMoments { codes, scales })?))
    }

    /// Sets the moments to zero.
    pub(crate) fn reset(&mut self) -> Result<()> {
        let zero = |tensor: &mut Tensor| tensor.f_zero_().map(drop);
        match self {
            Self::Fp32 { moments, .. } => moments.iter_mut().try_for_each(zero)?,
            Self::EightBit(Rounded { rows, .. }) => {
                let moments = rows.iter_mut().map(|row| &mut row.moments);
                moments.flat_map(|it| it.codes.iter_mut().chain(&mut it.scales)).try_for_each(zero)?;
            }
        }
        Ok(())
    }

    /// Replaces the moment with index `moment` by `values`, fp32 of the whole range.
    pub(crate) fn set(&mut self, moment: usize, values: &[f32]) -> Result<()> {
        let values = Tensor::f_from_slice(values)?;
        match self {
            Self::Fp32 { moments, .. } => moments[moment].f_copy_(&values)?,
            Self::EightBit(Rounded { rows, row_len, maps }) => {
                for (row, values) in rows.iter_mut().zip(values.f_split(*row_len as i64, 0)?) {
                    let device = row.moments.codes[moment].device();
                    row.moments.set(moment, &values.f_to_device(device)?, maps)?;
                }
            }
        }
        Ok(())
    }

    /// Runs one AdamW step on `weights` of the whole range.
    pub(crate) fn step(
        &mut self,
        weights: &Tensor,
        gradient: &Tensor,
        factors: &Tensor,
        StepHyper { adamw, learning_rate }: &StepHyper,
    ) -> Result<()> {
        let (hyper, all_decay) = (adamw.hyper(*learning_rate), adamw.decays == Decays::All);
        match self {
            Self::Fp32 { moments: [exp_avg, exp_avg_sq], runs } => {
                for (run, decays) in runs {
                    let part = |tensor: &Tensor| tensor.f_narrow(0, run.start as i64, run.len() as i64);
                    let weight_decay = if *decays || all_decay { hyper.weight_decay } else { 0.0 };
                    let hyper = ops::AdamW { weight_decay, ..hyper };
                    let [mut w, mut m, mut v] = [part(weights)?, part(exp_avg)?, part(exp_avg_sq)?];
                    ops::adamw_(&mut w, &mut m, &mut v, &part(gradient)?, factors, &hyper)?;
                }
                Ok(())
            }
            Self::EightBit(rounded) => rounded.step(weights, gradient, factors, &hyper, all_decay),
        }
    }
}

impl Rounded {
    /// Takes the slices of `whole`, moments of the elements `range` of a unit.
    fn new(layout: &Layout, range: &Range<usize>, whole: &EightBitMoments) -> Result<Rounded> {
        let (row_len, device) = (layout.slice_len(), whole.codes[0].device());
        let row = |index: usize| -> Result<Row> {
            let start = range.start + index * row_len;
            Ok(Row {
                moments: whole.row(index, row_len)?,
                of_matrices: DecayRuns::new(layout.decay_runs(&(start..start + row_len)), device)?,
                of_all: DecayRuns::new(vec![(0..row_len, true)], device)?,
            })
        };
        let rows = (0..slices(layout, range.len())).map(row).collect::<Result<_>>()?;
        Ok(Rounded { rows, row_len, maps: MomentMaps::on(device)? })
    }

    /// Returns whole slices of the moment with index `moment`.
    pub(crate) fn part(&self, moment: usize, range: Range<usize>) -> RoundedPart {
        let row_at = |element: usize| element.checked_div(self.row_len).unwrap_or(0);
        let rows = &self.rows[row_at(range.start)..row_at(range.end)];
        let rows = rows.iter().map(|row| row.moments.shallow_clone()).collect();
        RoundedPart { moment, rows, maps: self.maps.shallow_clone() }
    }

    fn step(
        &mut self,
        weights: &Tensor,
        gradient: &Tensor,
        factors: &Tensor,
        hyper: &ops::AdamW,
        all_decay: bool,
    ) -> Result<()> {
        let Rounded { rows, row_len, maps } = self;
        for (index, row) in rows.iter_mut().enumerate() {
            let part = |tensor: &Tensor| tensor.f_narrow(0, (index * *row_len) as i64, *row_len as i64);
            let runs = if all_decay { &row.of_all } else { &row.of_matrices };
            let (mut weights, gradient) = (part(weights)?, part(gradient)?);
            ops::adamw_in_eight_bits_(&mut weights, &mut row.moments, &gradient, factors, runs, hyper, maps)?;
        }
        Ok(())
    }
}

impl RoundedPart {
    /// Returns the values, fp32.
    pub(crate) fn values(&self) -> Result<Tensor> {
        if self.rows.is_empty() {
            return Ok(Tensor::f_empty([0], (Kind::Float, Device::Cpu))?);
        }
        let values: Result<Vec<_>, _> =
            self.rows.iter().map(|row| row.values(self.moment, &self.maps)).collect();
        Ok(Tensor::f_cat(&values?, 0)?)
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.rows.iter().map(|row| row.codes[self.moment].numel()).sum()
    }
}
