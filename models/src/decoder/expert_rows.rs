//! Rows of tokens at the experts that they chose: on this rank, or on the ranks among which experts are spread.
//!
//! A rank sorts the rows of its tokens by expert. Each rank has consecutive experts, so that the rows for a rank are
//! consecutive, too, and travel in one all-to-all. Where they arrive, they are sorted by expert, for an expert by the rank
//! that sent them, and of a rank by token. So sums repeat to the bit.
//!
//! Ranks that hold a layer together and each have some experts all have all rows, and each skips those of others.

use std::sync::Arc;

use anyroll_backends::ops::{self, Dispatch, Groups};
use tch::{Device, Kind, Tensor};

use crate::{Peers, Result};

/// The order of rows at their experts, and the way there and back.
pub(super) struct ExpertRows {
    /// The rows of this rank's tokens, sorted by expert.
    dispatch: Dispatch,
    /// `None` if all experts are on this rank, or no row travels.
    travel: Option<Travel>,
    /// The rows behind those of this rank's experts, whose products do not count, if there may be some: bool `[R, 1]`.
    skipped: Option<Tensor>,
}

/// Rows on their way to the experts of several ranks.
struct Travel {
    peers: Arc<dyn Peers>,
    /// Numbers of rows for this rank's tokens: int64 `[2, ranks, experts of a rank]`, on the host. First those that this rank
    /// sends to the experts of each rank, then those that each rank sends to the experts of this one.
    counts: Tensor,
    sent: Vec<usize>,
    received: Vec<usize>,
    /// The received rows, sorted by expert.
    dispatch: Dispatch,
}

impl ExpertRows {
    /// The rows of tokens that chose `chosen` `[N, J]` of `experts`. With `peers` these are spread over ranks, all of which
    /// call this. `counts` are [`Self::counts`] of the same choice, if they are known.
    pub fn new(
        chosen: &Tensor,
        experts: i64,
        peers: Option<&Arc<dyn Peers>>,
        counts: Option<&Tensor>,
    ) -> Result<ExpertRows> {
        let dispatch = Dispatch::new(chosen, experts)?;
        let travel = peers.map(|peers| {
            let counts = match counts {
                Some(counts) => counts.shallow_clone(),
                None => counted(&dispatch, &**peers)?,
            };
            Travel::new(peers.clone(), counts, chosen.device())
        });
        Ok(ExpertRows { dispatch, travel: travel.transpose()?, skipped: None })
    }

    /// The rows of tokens that chose `chosen` `[N, J]`, of which those of the `count` experts from `first` on are computed on this
    /// rank, and the others on other ranks that have the same rows.
    pub fn of_own(chosen: &Tensor, (first, count): (i64, i64)) -> Result<ExpertRows> {
        let own = chosen.f_sub_scalar(first)?;
        let is_elsewhere = own.f_lt(0)?.f_logical_or(&own.f_ge(count)?)?;
        // Behind all others, as those of one more expert.
        let numbers = own.f_masked_fill(&is_elsewhere, count)?;
        let mut dispatch = Dispatch::new(&numbers, count + 1)?;
        dispatch.groups = dispatch.groups.first(count)?;
        let skipped = Some(dispatch.sorted(&is_elsewhere)?);
        Ok(ExpertRows { dispatch, travel: None, skipped })
    }

    /// Returns the numbers of rows that ranks send each other, for [`Self::new`].
    pub fn counts(&self) -> Option<Tensor> {
        self.travel.as_ref().map(|travel| travel.counts.shallow_clone())
    }

    /// The rows of each of this rank's experts.
    pub fn groups(&self) -> &Groups {
        &self.travel.as_ref().map_or(&self.dispatch, |travel| &travel.dispatch).groups
    }

    /// Returns the rows of this rank's experts `[R, C]`, from those of each rank's tokens, `x` `[N, C]`.
    pub fn spread(&self, x: &Tensor) -> Result<Tensor> {
        self.to_experts(self.dispatch.spread(x)?)
    }

    /// Returns numbers of the tokens' choices, `[N, J]` on each rank, in the order of the rows: `[R, 1]`.
    pub fn sorted(&self, of_choices: &Tensor) -> Result<Tensor> {
        self.to_experts(self.dispatch.sorted(of_choices)?)
    }

    /// Returns the scalar products of the rows `[R, F]` of `a` and `b` as those of each token's choices: fp32 `[N, J]`.
    pub fn dots(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        match &self.travel {
            None => Ok(self.dispatch.dots(a, b)?),
            Some(travel) => Ok(self.dispatch.of_choices(&travel.back(ops::row_dots(a, b)?)?)?),
        }
    }

    /// Returns `base` `[N, C]` plus the sum of each token's `rows`: see [`Dispatch::add_up`].
    pub fn add_up(&self, base: &Tensor, rows: Tensor, weights: Option<&Tensor>) -> Result<Tensor> {
        let rows = match (&self.travel, &self.skipped) {
            (Some(travel), _) => travel.back(rows)?,
            // Nothing has written them.
            (None, Some(skipped)) => rows.f_masked_fill(skipped, 0.0)?,
            (None, None) => rows,
        };
        Ok(self.dispatch.add_up(base, &rows, weights)?)
    }

    fn to_experts(&self, rows: Tensor) -> Result<Tensor> {
        match &self.travel {
            None => Ok(rows),
            Some(travel) => travel.there(rows),
        }
    }
}

/// Returns [`Travel::counts`] for rows in the order of `dispatch`. Waits for the device: the host needs the lengths.
fn counted(dispatch: &Dispatch, peers: &dyn Peers) -> Result<Tensor> {
    let sent = dispatch.groups.counts()?.f_to_kind(Kind::Int64)?.f_view([peers.count() as i64, -1])?;
    let received = peers.all_to_all(&sent)?;
    Ok(Tensor::f_stack(&[sent, received], 0)?.f_to_device(Device::Cpu)?)
}

impl Travel {
    fn new(peers: Arc<dyn Peers>, counts: Tensor, device: Device) -> Result<Travel> {
        let [_, ranks, experts] = counts.size()[..] else { unreachable!("counts have three dimensions") };
        let rows = |direction: i64| -> Result<Vec<usize>> {
            let of_ranks = counts.f_get(direction)?.f_sum_dim_intlist([1].as_slice(), false, None)?;
            Ok(Vec::<i64>::try_from(of_ranks)?.into_iter().map(|rows| rows as usize).collect())
        };
        let (sent, received) = (rows(0)?, rows(1)?);
        let numbers = Tensor::f_arange(experts, (Kind::Int64, device))?.f_repeat([ranks])?;
        let of_parts = counts.f_get(1)?.f_flatten(0, 1)?.f_to_device(device)?;
        let arrived = received.iter().sum::<usize>() as i64;
        let of_rows = numbers.f_repeat_interleave_self_tensor(&of_parts, 0, arrived)?;
        let dispatch = Dispatch::new(&of_rows.f_unsqueeze(1)?, experts)?;
        Ok(Travel { peers, counts, sent, received, dispatch })
    }

    /// Sends the rows of this rank's tokens, sorted by expert, to their experts.
    fn there(&self, rows: Tensor) -> Result<Tensor> {
        Ok(self.dispatch.spread(&self.peers.all_to_all_rows(rows, &self.sent, &self.received)?)?)
    }

    /// Sends the rows of this rank's experts back to their tokens, where they are sorted by expert.
    fn back(&self, rows: Tensor) -> Result<Tensor> {
        let unsorted = self.dispatch.unsorted(&rows)?;
        drop(rows);
        self.peers.all_to_all_rows(unsorted, &self.received, &self.sent)
    }
}
