//! Times real completions with prompt-lookup speculation and without: `bench_speculation MODEL PROMPTS BATCH... [--tokens 256]
//! [--temperature 0]`.
//!
//! PROMPTS is a JSON Lines file, with a `kind` and a user's `prompt` a line. For each kind, batch and speculation it prints a JSON
//! line: the seconds from the prompts' end to the last token, the tokens, what was proposed and accepted, and the share
//! of tokens up to the first that differs from those without speculation. `bench/generate/prompts.py` writes such a file.

#![forbid(unsafe_code)]

use std::{path::Path, sync::Arc, time::Instant};

use anyroll_data::Record;
use anyroll_models::{
    Engine, Request, Sample, SamplingParams,
    generation::{Speculated, Speculation},
};
use anyroll_pipelines::{
    inference::Capacity,
    loaded::{LoadedModel, Options},
};
use serde_json::Value;

/// Tokens proposed, and sequences in flight up to which they are; no tokens for none.
const WAYS: [(usize, usize); 6] = [(0, 0), (3, 64), (7, 64), (15, 64), (7, 8), (7, 16)];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut next =
        || arguments.next().expect("usage: bench_speculation MODEL PROMPTS BATCH..., see its source");
    let (model, prompts) = (next(), std::fs::read_to_string(next()).expect("a file of prompts"));
    let (mut batches, mut tokens, mut temperature) = (Vec::new(), 256, 0.0);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().expect("a number follows").parse::<f64>().expect("a number");
        match argument.as_str() {
            "--tokens" => tokens = number() as usize,
            "--temperature" => temperature = number(),
            batch => batches.push(batch.parse::<usize>().expect("a batch size")),
        }
    }
    let options = Options { chat: true, ..Options::default() };
    let mut model = LoadedModel::open(Path::new(&model), &options).unwrap();
    let params = SamplingParams {
        temperature,
        max_new_tokens: tokens,
        stop_tokens: model.tokenizer.stop_tokens(),
        ..Default::default()
    };
    let lines: Vec<Value> = prompts.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for of_kind in lines.chunk_by(|one, other| one["kind"] == other["kind"]) {
        let encode = |line: &Value| {
            let prompt = line["prompt"].as_str().expect("a prompt").to_owned();
            model.tokenizer.encode_prompt(&Record { prompt, ..Record::default() }).unwrap()
        };
        let prompts: Vec<Vec<i64>> = of_kind.iter().map(encode).collect();
        let longest = tokens + prompts.iter().map(Vec::len).max().unwrap_or(0);
        for &batch in &batches {
            let mut without = Vec::new();
            for (proposed, sequences) in WAYS {
                let speculation = (proposed > 0).then_some(Speculation {
                    tokens: proposed,
                    longest: 4,
                    shortest: 2,
                    sequences,
                });
                let mut run = || {
                    let capacity = Capacity { sequences: batch, longest, memory: 0.5, speculation };
                    completions(model.engine(capacity).unwrap(), &prompts, &params, batch)
                };
                run(); // kernels are loaded
                let Run { found, seconds, passes, speculated } = run();
                let made: usize = found.iter().map(Vec::len).sum();
                if proposed == 0 {
                    without.clone_from(&found);
                }
                let same = found
                    .iter()
                    .zip(&without)
                    .map(|(a, b)| a.iter().zip(b).take_while(|(a, b)| a == b).count());
                println!(
                    "{{\"kind\": {}, \"temperature\": {temperature}, \"batch\": {batch}, \"proposed\": {proposed}, \"sequences\": {sequences}, \"seconds\": {seconds:.4}, \
                     \"tokens\": {made}, \"tokens_per_s\": {:.0}, \"passes\": {passes}, \"proposals\": {}, \"proposed_tokens\": {}, \"accepted_tokens\": {}, \"same\": {:.3}}}",
                    of_kind[0]["kind"],
                    made as f64 / seconds,
                    speculated.proposals,
                    speculated.proposed,
                    speculated.accepted,
                    same.sum::<usize>() as f64 / made as f64,
                );
            }
        }
    }
}

/// Completions of a batch.
struct Run {
    found: Vec<Vec<i64>>,
    /// Time behind the prompts.
    seconds: f64,
    passes: usize,
    speculated: Speculated,
}

/// Completes the prompts in turn, `batch` of them.
fn completions(mut engine: Engine, prompts: &[Vec<i64>], params: &SamplingParams, batch: usize) -> Run {
    for number in 0..batch {
        let samples = vec![Sample { seed: number as u64, ..Sample::default() }];
        let (prompt, params) = (prompts[number % prompts.len()].clone(), Arc::new(params.clone()));
        engine.submit(Request { prompt, params, stop: None, format: None, samples }).unwrap();
    }
    let mut found = vec![Vec::new(); batch];
    let (mut passes, mut started) = (0, Instant::now());
    while !engine.is_idle() {
        let waited = engine.load().waiting > 0;
        for (id, completion) in engine.step().unwrap() {
            found[id as usize] = completion.tokens;
        }
        passes += 1;
        if waited {
            started = Instant::now();
        }
    }
    Run { found, seconds: started.elapsed().as_secs_f64(), passes, speculated: engine.load().speculated }
}
