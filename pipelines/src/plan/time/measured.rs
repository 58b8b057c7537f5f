//! The plan of a step's time against the measurements of docs/results.

use anyroll_backends::Card;
use anyroll_models::{Decoder, PackedSize};
use anyroll_strategy::{
    Precision, Recompute, ZeroConfig, ZeroStage,
    plan::{Ranks, held},
};

use super::{
    network::Network,
    rates::{Rates, Sheet},
    sampling::Sampling,
    training::{Away, Place, Update, scored, trained},
};

#[path = "../../../../strategy/examples/train/shapes.rs"]
mod shapes;

const MEASURED: &str = include_str!("measured.tsv");
/// Bounds of the error of each row, by its work: of rows that rates were fitted to, and of all others.
const MOST: [(&str, f64, f64); 5] = [
    ("train", 0.02, 0.06),
    ("split", 0.0, 0.25),
    ("score", 0.0, 0.1),
    ("sample", 0.09, 0.28),
    ("grpo", 0.13, 0.11),
];

/// A row of `measured.tsv`.
struct Row {
    is_fitted: bool,
    work: &'static str,
    device: &'static str,
    devices: usize,
    model: &'static str,
    batch: usize,
    tokens: usize,
    options: Vec<&'static str>,
    measured: f64,
}

impl Row {
    fn all() -> impl Iterator<Item = Self> {
        MEASURED.lines().filter(|line| !line.starts_with('#')).skip(1).map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let number = |index: usize| fields[index].parse().unwrap();
            Self {
                is_fitted: fields[0] == "fit",
                work: fields[1],
                device: fields[2],
                devices: number(3),
                model: fields[4],
                batch: number(5),
                tokens: number(6),
                options: fields[7].split(',').collect(),
                measured: fields[8].parse().unwrap(),
            }
        })
    }

    fn has(&self, option: &str) -> bool {
        self.options.contains(&option)
    }

    fn number(&self, option: &str) -> usize {
        let of = |it: &&str| it.strip_prefix(option)?.strip_prefix('=')?.parse().ok();
        self.options.iter().find_map(of).unwrap_or(1)
    }

    fn decoder(&self) -> Decoder {
        let shape = shapes::decoder(self.model, self.tokens as i64);
        Decoder::new(shape, tch::Device::Cpu).unwrap().keeping_logits(self.has("keep_logits"))
    }

    fn config(&self) -> ZeroConfig {
        let recompute = if self.has("recompute=full") { Recompute::Full } else { Recompute::None };
        let stage = ZeroStage::try_from(self.number("stage") as u64).unwrap();
        ZeroConfig { precision: Precision::Bf16, recompute, ..stage.into() }
    }

    fn at(&self) -> (Place, Rates) {
        let sheet = Sheet::from(Card::find(self.device).unwrap());
        let rates = Rates::new(sheet, self.devices, !self.has("any_order"));
        let network = Network {
            hosts: 1,
            devices_per_host: self.devices,
            in_host: rates.in_host,
            between: f64::INFINITY,
        };
        let shards = network.neighbours(self.devices).unwrap();
        (Place { network, shards, ordered: true }, rates)
    }

    fn planned(&self) -> f64 {
        match self.work {
            "train" | "split" => self.training(),
            "score" => self.scoring(),
            "sample" => self.sampling(),
            "grpo" => self.step(),
            other => panic!("no work {other:?}"),
        }
    }

    fn micro_batch(&self) -> Update {
        let size = PackedSize::uniform(self.batch, 1, self.tokens).over(self.number("sequence"));
        Update { count: 1, size, rest: None }
    }

    /// A step in a series of them, each with the gathers of the one before.
    fn training(&self) -> f64 {
        let (model, config) = (self.decoder(), self.config());
        let steps = |count| {
            let update = (self.micro_batch(), count);
            trained(&model, config, update, Away::default(), self.at()).unwrap().seconds()
        };
        (self.batch * self.tokens) as f64 / (steps(3) - steps(2))
    }

    fn scoring(&self) -> f64 {
        let scored = scored(&self.decoder(), self.config(), self.micro_batch(), self.at()).unwrap();
        (self.batch * self.tokens) as f64 / scored.0.total
    }

    fn sampling(&self) -> f64 {
        let together = self.number("together");
        let sampling = Sampling {
            sequences: self.batch,
            in_flight: self.batch,
            prompts: self.batch,
            prompt: 256,
            completion: self.tokens,
            together,
        };
        let dtype = self.config().precision.dtype();
        let (seconds, _) = sampling.time(&self.decoder(), dtype, &self.at().1);
        (self.batch * self.tokens) as f64 / seconds
    }

    /// A step of `bench/rlvr_gpu`: groups of eight, micro-batches of 16, states on the host while it samples.
    fn step(&self) -> f64 {
        let (model, config, (place, rates)) = (self.decoder(), self.config(), self.at());
        let own = self.batch / self.devices;
        let sampling = Sampling {
            sequences: own,
            in_flight: own,
            prompts: own / 8,
            prompt: 128,
            completion: self.tokens,
            together: 1,
        };
        let (sampled, _) = sampling.time(&model, config.precision.dtype(), &rates);
        let ranks = Ranks {
            tensor: 1,
            experts: 1,
            world_size: self.devices,
            shards: self.devices,
            granularity_bytes: 1,
            sums_in_rank_order: true,
        };
        let states = held(&model, config, true, ranks).optimizer;
        let size = PackedSize::of_groups(16, 8, 128, self.tokens);
        let update = Update { count: own / 16, size, rest: None };
        let trained = trained(&model, config, (update, 1), Away { bytes: states }, (place, rates)).unwrap();
        let leaving = (states as f64 / rates.host_link - sampled).max(0.0);
        sampled + trained.seconds() + trained.gathered.0.total + leaving
    }
}

#[test]
fn measured_steps_are_within_the_stated_errors() {
    let mut missed = Vec::new();
    for row in Row::all() {
        let planned = row.planned();
        let error = planned / row.measured - 1.0;
        let Row { work, device, devices, model, batch, tokens, .. } = &row;
        let options = row.options.join(",");
        let kind = if row.is_fitted { "fit" } else { "held" };
        let line = format!(
            "{kind:<5}{work:<7}{devices} x {device} {model:<11}{batch:>4} x {tokens:<6}{options:<40}{:>10} {planned:>10.3} \
             {:>+6.1} %",
            row.measured,
            100.0 * error
        );
        println!("{line}");
        let bound = MOST.iter().find(|(of, ..)| of == work).unwrap();
        if error.abs() > if row.is_fitted { bound.1 } else { bound.2 } {
            missed.push(line);
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}
