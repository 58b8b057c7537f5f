//! Mixtures of experts made from scratch.

use super::*;

fn with(fields: &str) -> Result<Loaded, Error> {
    let decoder = "hidden_size: 16, layers: 2, heads: 2, intermediate_size: 32, max_length: 16";
    read(SMALL, &[&format!("model.decoder={{{decoder}, {fields}}}")])
}

#[test]
fn a_mixture_is_resolved() {
    let experts = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8, qk_norm: true";
    let loaded = with(experts).unwrap();
    let config = loaded.resolve(&machine()).unwrap().config;
    let ModelConfig::Decoder(decoder) = &config.model else { panic!("another model") };
    assert_eq!(decoder.norm_topk_prob, Some(true));
    let plain = read(SMALL, &[]).unwrap().resolve(&machine()).unwrap().config;
    let ModelConfig::Decoder(decoder) = &plain.model else { panic!("another model") };
    assert_eq!((decoder.num_experts, decoder.norm_topk_prob), (None, None));
}

#[test]
fn what_is_no_mixture_is_refused_by_its_field() {
    let whole = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8, qk_norm: true";
    let check = |fields: &str, field: &str, expected: &str| {
        let error = with(fields).err().unwrap_or_else(|| panic!("{fields} is taken")).to_string();
        let named = format!("model.decoder.{field}: ");
        assert!(error.contains(&named) && error.contains(expected), "{error} has not {named}{expected}");
    };
    let changed = |from: &str, to: &str| whole.replace(from, to);
    check("num_experts_per_tok: 2", "num_experts_per_tok", "there are no experts");
    check("mlp_only_layers: [0]", "mlp_only_layers", "there are no experts");
    check("num_experts: 4, moe_intermediate_size: 8", "num_experts", "have no `num_experts_per_tok`");
    check("num_experts: 4, num_experts_per_tok: 2", "num_experts", "have no `moe_intermediate_size`");
    check(&changed("num_experts: 4", "num_experts: 0"), "num_experts", "it is 0");
    check(&changed("per_tok: 2", "per_tok: 5"), "num_experts_per_tok", "cannot go to 5 of 4 experts");
    check(&format!("{whole}, mlp_only_layers: [2]"), "mlp_only_layers", "there is no layer 2");
    check(&format!("{whole}, mlp_only_layers: [0, 1]"), "mlp_only_layers", "no layer has experts");
    check(&changed("qk_norm: true", "qk_norm: false"), "num_experts", "have norms on queries and keys");
}
