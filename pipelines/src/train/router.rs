//! Statistics of the routers of a mixture of experts in training.

use anyroll_models::{OTHERS, PackedBatch, RouterSums};
use serde::{Deserialize, Serialize};
use tch::{Device, TchError, Tensor};

use super::{Exchange, Reduce, reduced};
use crate::{Result, metrics::Metrics};

/// Sums over a step's micro-batches, on the device until they are read.
#[derive(Debug, Default)]
pub struct RouterStats(Option<RouterSums>);

reduced! {
    /// Sums over a step's micro-batches, of all ranks.
    struct RouterTotals {
        /// Choices of each expert in each layer.
        nested load: Load,
        /// Rows of all layers.
        sum rows: f64,
        /// Entropies of the rows' probabilities.
        sum entropy: f64,
        /// Rows with the experts of sampling.
        sum replayed: f64,
        /// Rows with other experts than their router's choice.
        sum differing: f64,
        /// Balancing losses of micro-batches.
        sum balance: f64,
        /// Micro-batches.
        sum batches: f64,
    }
}

/// Choices of each expert, layer by layer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Load(Vec<Vec<f64>>);

impl Reduce for Load {
    fn reduce(&mut self, next: Self) {
        let pairs = self.0.iter_mut().flatten().zip(next.0.into_iter().flatten());
        pairs.for_each(|(own, next)| *own += next);
    }
}

impl RouterStats {
    /// Adds a micro-batch that was trained on; one without experts adds nothing. Only with `as_sampled` weights do other
    /// choices than the given ones count.
    pub fn add(&mut self, batch: &PackedBatch, as_sampled: bool) -> Result<()> {
        let Some(next) = batch.router().map(|router| router.take()).transpose()?.flatten() else {
            return Ok(());
        };
        if !as_sampled {
            drop(next.others.f_narrow(0, OTHERS - 2, 2)?.f_zero_()?);
        }
        self.0 = Some(match self.0.take() {
            Some(sums) => RouterSums {
                load: sums.load.f_add(&next.load)?,
                others: sums.others.f_add(&next.others)?,
                balance: sums.balance.f_add(&next.balance)?,
            },
            None => next,
        });
        Ok(())
    }

    /// Metrics over all ranks, empty without experts; waits for the device. Every rank must call this. `balances` is true
    /// if the balancing loss is part of the loss, `replays` if experts of sampling were given.
    pub fn metrics(&self, exchange: &Exchange, balances: bool, replays: bool) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        // Either all ranks have experts or none.
        let Some(sums) = &self.0 else { return Ok(metrics) };
        let totals = exchange.reduce(&read(sums)?)?;
        metrics.insert("router/entropy", totals.entropy / totals.rows);
        let layers = totals.load.0.iter();
        let largest = layers.map(|load| {
            let mean = load.iter().sum::<f64>() / load.len() as f64;
            load.iter().copied().fold(0.0, f64::max) / mean
        });
        metrics.insert("router/load_max", largest.fold(0.0, f64::max));
        let idle = totals.load.0.iter().flatten().filter(|&&load| load == 0.0).count();
        metrics.insert("router/idle_experts", idle as f64);
        if balances {
            metrics.insert("loss/router_balance", totals.balance / totals.batches);
        }
        if replays {
            metrics.insert("rollout/routing_diff", totals.differing / totals.replayed.max(1.0));
        }
        Ok(metrics)
    }
}

fn read(RouterSums { load, others, balance }: &RouterSums) -> Result<RouterTotals, TchError> {
    let on_host =
        |of: &Tensor| Vec::<f64>::try_from(of.f_contiguous()?.f_to_device(Device::Cpu)?.f_view(-1)?);
    let experts = load.size()[1] as usize;
    let load = Load(on_host(load)?.chunks_exact(experts).map(<[f64]>::to_vec).collect());
    let others = on_host(others)?;
    let &[rows, entropy, replayed, differing] = &others[..] else {
        unreachable!("there are {OTHERS} other sums")
    };
    let balance = on_host(balance)?;
    Ok(RouterTotals { load, rows, entropy, replayed, differing, balance: balance[0], batches: balance[1] })
}
