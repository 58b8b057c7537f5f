//! The value head on the decoder's blocks.

use anyroll_models::{
    DecoderConfig, Grads, Model, Output, OutputGrad, PackedBatch, ParamSpec, Saved, Sequence, UnitGrads,
    ValueHead, ValueModel, Weights, init,
};
use tch::{Device, Kind, Tensor};

/// Returns the shape of a decoder with two layers and biases.
pub fn config() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 19,
        num_key_value_heads: 2,
        head_dim: 4,
        intermediate_size: 20,
        rope_theta: 100.0,
        qkv_bias: true,
        initializer_range: 0.3,
        ..DecoderConfig::plain(2, 12, 4)
    }
}

/// Returns the seed's weights in fp64, with a random head instead of the initial 0.
fn weights(model: &ValueModel) -> Vec<Vec<Tensor>> {
    let tensor = |spec: &ParamSpec| {
        let tensor = Tensor::from_slice(&init::fill(spec, 1)).view(spec.shape.as_slice());
        match spec.name.as_str() {
            // The rows of two classes differ.
            "score.weight" => {
                tensor.to_kind(Kind::Double)
                    + Tensor::from_slice(&[0.7, -0.4]).narrow(0, 0, spec.shape[0]).unsqueeze(1)
            }
            "score.bias" => tensor.to_kind(Kind::Double) + Tensor::from_slice(&[0.2, 0.5]),
            _ => tensor.to_kind(Kind::Double),
        }
    };
    model.units().iter().map(|unit| unit.params.iter().map(tensor).collect()).collect()
}

fn pack(sequences: &[(Vec<i64>, usize)]) -> PackedBatch {
    let sequences: Vec<Sequence> =
        sequences.iter().map(|(tokens, prompt_len)| Sequence { tokens, prompt_len: *prompt_len }).collect();
    PackedBatch::sharing(&sequences, 1.0, Device::Cpu).unwrap()
}

fn forward(model: &ValueModel, weights: &[Vec<Tensor>], batch: &PackedBatch) -> (Tensor, Vec<Saved>) {
    let (mut hidden, mut all_saved) = (None, Vec::new());
    for block in 0..model.blocks() {
        let units: Vec<&[Tensor]> = model.units_of(block).iter().map(|&unit| &weights[unit][..]).collect();
        let (output, saved) =
            model.forward(block, &Weights::new(&units), hidden.as_ref(), batch, true).unwrap();
        all_saved.push(saved);
        match output {
            Output::Hidden(x) => hidden = Some(x),
            Output::Scores(values) => return (values, all_saved),
        }
    }
    unreachable!("the last block returns values")
}

#[test]
fn values_begin_at_zero_and_do_not_see_what_they_value() {
    for head in [ValueHead::Number, ValueHead::Classes] {
        check_values(&ValueModel::with_head(config(), head, Device::Cpu).unwrap());
    }
}

fn check_values(model: &ValueModel) {
    let fresh: Vec<Vec<Tensor>> = model
        .units()
        .iter()
        .map(|unit| {
            let tensor =
                |spec: &ParamSpec| Tensor::from_slice(&init::fill(spec, 1)).view(spec.shape.as_slice());
            unit.params.iter().map(tensor).collect()
        })
        .collect();
    let (values, _) = forward(model, &fresh, &pack(&[(vec![1, 2, 3, 4], 2)]));
    assert_eq!(values.kind(), Kind::Float);
    assert_eq!(Vec::<f32>::try_from(values).unwrap(), [0.0, 0.0]);

    let weights = weights(model);
    let values = |tokens: &[i64]| {
        Vec::<f64>::try_from(forward(model, &weights, &pack(&[(tokens.to_vec(), 2)])).0).unwrap()
    };
    let (one, other) = (values(&[1, 2, 3, 4]), values(&[1, 2, 3, 9]));
    assert_eq!(one, other, "the last token's value is computed before it is seen");
    assert_ne!(values(&[1, 2, 5, 4])[1], one[1]);
}

/// Compares with a directional derivative of every weight.
#[test]
fn gradients_equal_finite_differences() {
    for head in [ValueHead::Number, ValueHead::Classes] {
        check_gradients(&ValueModel::with_head(config(), head, Device::Cpu).unwrap());
    }
}

fn check_gradients(model: &ValueModel) {
    let mut weights = weights(model);
    let tokens = |length: i64| (0..length).map(|i| (i * i + 3 * length) % 19).collect();
    // The last two share all rows, and have targets after the same ones.
    let batch = pack(&[(tokens(9), 4), (tokens(2), 1), (tokens(17), 1), (tokens(17), 9)]);
    assert_eq!(batch.tokens(), 8 + 1 + 16);
    tch::manual_seed(0);
    let dvalues = Tensor::randn([batch.targets()], (Kind::Double, Device::Cpu));
    let loss = |values: &Tensor| (values * &dvalues).sum(None).double_value(&[]);
    let (_, mut saved) = forward(model, &weights, &batch);

    let nan = |tensor: &Tensor| tensor.full_like(f64::NAN);
    let mut grads: Vec<UnitGrads> =
        weights.iter().map(|unit| UnitGrads::new(unit.iter().map(nan).collect())).collect();
    let mut grad = Some(OutputGrad::Scores(dvalues.shallow_clone()));
    for block in (0..model.blocks()).rev() {
        let unit = model.units_of(block)[0];
        let units = [&weights[unit][..]];
        let mut block_grads = Grads::new(vec![Some(&mut grads[unit])]);
        let (saved, output) = (saved.pop().unwrap(), grad.take().unwrap());
        let below = model.backward(block, &Weights::new(&units), &mut block_grads, saved, output, &batch);
        grad = below.unwrap().map(OutputGrad::Hidden);
    }
    for unit in 0..weights.len() {
        for param in 0..weights[unit].len() {
            let direction = weights[unit][param].randn_like();
            let found = (&grads[unit].views()[param] * &direction).sum(None).double_value(&[]);
            let mut moved = |distance: f64| {
                let _ = weights[unit][param].g_add_(&(&direction * distance));
                let moved = loss(&forward(model, &weights, &batch).0);
                let _ = weights[unit][param].g_add_(&(&direction * -distance));
                moved
            };
            let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            let error = (found - expected).abs() / expected.abs().max(1.0);
            assert!(error <= 1e-6, "unit {unit} param {param}: {found} {expected}");
        }
    }
}
