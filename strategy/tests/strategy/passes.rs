//! Several tapes open at a time, and weights that follow another model's.

use anyroll_models::ScoresGrad;
use anyroll_strategy::ZeroStage;
use tch::Tensor;

use crate::harness::{STAGES, accumulate, batch, floats, ranks, sequence, train, values, zero};

#[test]
fn two_open_tapes_add_what_two_micro_batches_add() {
    let parts: [Vec<Vec<i64>>; 2] = [0..3, 3..6].map(|range| range.map(|index| sequence(0, index)).collect());
    let gradient = |scores: &anyroll_models::Scores| ScoresGrad {
        logprobs: Tensor::full_like(&scores.logprobs, -0.1),
        entropy: None,
        divergence: None,
    };
    for stage in STAGES {
        let both = ranks(2, true, |device, group| {
            let mut apart = zero(stage, true, device, group.clone());
            parts.iter().for_each(|part| accumulate(&mut apart, part, -0.1));
            let norm = apart.step(1e-2).unwrap();
            let norm = apart.finish_step(&norm).unwrap();

            let mut nested = zero(stage, true, device, group);
            let [first, second] = parts.each_ref().map(|part| batch(part));
            let (first_scores, first_tape) = nested.record(&first).unwrap();
            let (second_scores, second_tape) = nested.record(&second).unwrap();
            // In the other order, which gives the same sum of two.
            assert!(nested.backward(&second, second_tape, gradient(&second_scores)).unwrap().is_none());
            assert!(nested.backward(&first, first_tape, gradient(&first_scores)).unwrap().is_none());
            let other = nested.step(1e-2).unwrap();
            assert_eq!(nested.finish_step(&other).unwrap(), norm, "{stage:?}");
            (values(&mut apart), values(&mut nested))
        });
        assert!(both.iter().all(|(apart, nested)| apart == nested), "{stage:?}");
    }
}

#[test]
fn weights_move_a_share_of_the_way() {
    let at = |stage: ZeroStage, share: f64| {
        let mut of_ranks = ranks(2, false, |device, group| {
            let (mut slow, mut fast) =
                (zero(stage, true, device, group.clone()), zero(stage, true, device, group));
            train(&mut fast, 0..2, 2);
            let before = floats(&mut slow);
            slow.move_towards(&mut fast, share).unwrap();
            (before, floats(&mut slow), floats(&mut fast))
        });
        of_ranks.remove(0)
    };
    for stage in STAGES {
        let (before, moved, target) = at(stage, 0.25);
        assert_ne!(before, target);
        for ((before, moved), target) in before.iter().zip(&moved).zip(&target) {
            let expected = before + 0.25 * (target - before);
            assert!((moved - expected).abs() <= 1e-6, "{stage:?}: {moved} is not {expected}");
        }
        let (_, moved, target) = at(stage, 1.0);
        assert_eq!(moved, target, "{stage:?}");
    }
}
