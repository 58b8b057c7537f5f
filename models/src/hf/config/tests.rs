use serde_json::json;

use super::*;
use crate::{
    Activation, DecoderConfig, DeepseekV3, ExpertNames, Expressed, Multipliers, NormPlaces, OtherRope, Pairs,
    QkNorm, RopeScaling, SlidingWindow,
};

/// Reads a small Llama's file with `changes`; a null removes a field.
fn read(changes: Value) -> Result<DecoderConfig> {
    let mut file = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
    });
    for (name, value) in changes.as_object().unwrap() {
        file[name] = value.clone();
    }
    let path = Path::new("m/config.json");
    let named: Architectures = serde_json::from_value(file.clone()).unwrap();
    let family = named.family(path, Task::Language)?;
    family.decoder_config(path, &serde_json::from_value(file).unwrap())
}

#[test]
fn families_differ_where_their_files_are_silent() {
    let llama = read(json!({})).unwrap();
    assert_eq!((llama.num_key_value_heads, llama.head_dim, llama.rope_theta), (2, 8, 10_000.0));
    assert_eq!((llama.qkv_bias, llama.qk_norm, llama.tie_word_embeddings), (false, None, false));
    let biased = read(json!({"attention_bias": true, "mlp_bias": true})).unwrap();
    assert_eq!((biased.qkv_bias, biased.o_bias, biased.mlp_bias), (true, true, true));
    let base = read(json!({"architectures": ["LlamaModel"], "tie_word_embeddings": true})).unwrap();
    assert!(base.tie_word_embeddings && !base.o_bias);
    let qwen2 = json!({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, "sliding_window": 8});
    let qwen2 = read(qwen2).unwrap();
    assert_eq!((qwen2.qkv_bias, qwen2.sliding_window), (true, None));
    let qwen3 = read(json!({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1})).unwrap();
    assert_eq!((qwen3.qk_norm, qwen3.head_dim), (Some(QkNorm::PerHead), 128));
    let mistral = json!({
        "architectures": ["MistralForCausalLM"], "num_key_value_heads": 1, "sliding_window": 8,
    });
    let window = |tokens, layers: &[bool]| Some(SlidingWindow { tokens, layers: layers.to_vec() });
    assert_eq!(read(mistral).unwrap().sliding_window, window(8, &[true]));
    let mistral = |tokens: Value| {
        json!({
            "architectures": ["MistralForCausalLM"], "num_key_value_heads": 1, "sliding_window": tokens,
        })
    };
    assert_eq!(read(mistral(Value::Null)).unwrap().sliding_window, None);
    let mut some = mistral(json!(8));
    some["layer_types"] = json!(["full_attention"]);
    assert_eq!(read(some).unwrap().sliding_window, None);
}

#[test]
fn windows_are_of_layers() {
    let qwen = |changes: Value| {
        let mut file = json!({
            "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1, "num_hidden_layers": 3,
            "use_sliding_window": true, "sliding_window": 8,
        });
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file).map(|config| config.sliding_window.map(|window| (window.tokens, window.layers)))
    };
    assert_eq!(qwen(json!({})).unwrap(), None, "the first 28 layers have no window");
    let from_second = Some((8, vec![false, true, true]));
    assert_eq!(qwen(json!({"max_window_layers": 1})).unwrap(), from_second);
    let kinds = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    let found = qwen(json!({"max_window_layers": 1, "layer_types": kinds})).unwrap();
    assert_eq!(found, Some((8, vec![true, false, true])), "`layer_types` wins");
    assert_eq!(qwen(json!({"max_window_layers": 0, "use_sliding_window": false})).unwrap(), None);
    let error = qwen(json!({"layer_types": ["chunked_attention"]})).unwrap_err().to_string();
    assert!(error.contains("`layer_types` has `chunked_attention`"), "{error}");
    let error = qwen(json!({"layer_types": ["sliding_attention"]})).unwrap_err().to_string();
    assert!(error.contains("`layer_types` has 1 entries"), "{error}");
}

#[test]
fn layers_of_smollm3_turn_or_do_not() {
    let smollm3 = |changes: Value| {
        let mut file = json!({
            "architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 1, "num_hidden_layers": 4,
        });
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    let still = |changes: Value| smollm3(changes).map(|config| config.other_rope.map(|other| other.layers));
    let silent = smollm3(json!({})).unwrap();
    assert_eq!((silent.rope_theta, silent.tie_word_embeddings), (2_000_000.0, true));
    assert_eq!((silent.sliding_window, silent.qkv_bias, silent.mlp_bias), (None, false, false));
    let every_fourth = OtherRope { theta: None, layers: vec![false, false, false, true] };
    assert_eq!(silent.other_rope, Some(every_fourth));
    let named = json!({"no_rope_layers": [0, 1, 1, 0, 1]});
    assert_eq!(still(named).unwrap(), Some(vec![true, false, false, true]));
    assert_eq!(still(json!({"no_rope_layers": [1, 1, 1, 1]})).unwrap(), None);
    let slides = json!({"use_sliding_window": true, "sliding_window": 8, "no_rope_layer_interval": 2});
    let found = smollm3(slides).unwrap().sliding_window;
    assert_eq!(found, Some(SlidingWindow { tokens: 8, layers: vec![false, true, false, true] }));
    assert_eq!(smollm3(json!({"use_sliding_window": true})).unwrap().sliding_window, None);
    let check = |changes: Value, expected: &str| {
        let error = smollm3(changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(json!({"no_rope_layers": [1, 1]}), "`no_rope_layers` has 2 entries");
    check(json!({"no_rope_layer_interval": 0}), "`no_rope_layer_interval` is 0");
    let kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"];
    check(json!({"layer_types": kinds, "sliding_window": 8}), "`use_sliding_window` is false");
    let unsized_window = json!({"layer_types": kinds, "use_sliding_window": true});
    check(unsized_window, "`sliding_window` is null");
}

#[test]
fn norms_of_olmo_are_of_branches() {
    let olmo = |family: &str, changes: Value| {
        let architecture = format!("{family}ForCausalLM");
        let mut file = json!({"architectures": [architecture], "num_hidden_layers": 4});
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    let two = olmo("Olmo2", json!({"sliding_window": 8})).unwrap();
    assert_eq!((two.norms, two.qk_norm), (NormPlaces::After, Some(QkNorm::Together)));
    assert_eq!((two.rms_norm_eps, two.num_key_value_heads, two.sliding_window), (1e-5, 2, None));
    let yarn = json!({"rope_type": "yarn", "factor": 2.0});
    let three = olmo("Olmo3", json!({"rope_scaling": yarn, "rope_theta": 50.0})).unwrap();
    let layers = vec![true, true, true, false];
    assert_eq!(three.sliding_window, Some(SlidingWindow { tokens: 4096, layers: layers.clone() }));
    assert_eq!(three.other_rope, Some(OtherRope { theta: Some(50.0), layers }));
    assert_eq!(olmo("Olmo3", json!({})).unwrap().other_rope, None, "without scaling all layers rotate alike");
    let error = olmo("Olmo3", json!({"sliding_window": null})).unwrap_err().to_string();
    assert!(error.contains("`sliding_window` is null, but layers have a sliding window"), "{error}");
}

/// In the format of newer files.
#[test]
fn rotations_are_of_kinds_of_layers() {
    let read = |family: &str, full: &Value, sliding: Value| {
        read(json!({
            "architectures": [format!("{family}ForCausalLM")], "num_hidden_layers": 4, "num_key_value_heads": 1,
            "rope_theta": null, "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        }))
    };
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "rope_theta": 50.0});
    let plain = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
    let other = read("Olmo3", &yarn, plain(50.0)).unwrap();
    let of_sliding = |theta| Some(OtherRope { theta: Some(theta), layers: vec![true, true, true, false] });
    assert_eq!((other.rope_theta, other.other_rope), (50.0, of_sliding(50.0)));
    assert!(matches!(other.rope_scaling, RopeScaling::Yarn { factor: 2.0, .. }));
    assert_eq!(read("Olmo3", &yarn, plain(9.0)).unwrap().other_rope, of_sliding(9.0));
    assert_eq!(read("Olmo3", &plain(9.0), plain(9.0)).unwrap().other_rope, None);
    assert_eq!(read("Olmo3", &yarn, yarn.clone()).unwrap().other_rope, None);
    for (family, sliding, expected) in [
        (
            "Olmo3",
            json!({"rope_type": "linear", "factor": 2.0}),
            "`rope_parameters.sliding_attention.rope_type` has a scaling other",
        ),
        (
            "Olmo3",
            json!({"rope_type": "linear", "factor": "2"}),
            "`rope_parameters.sliding_attention.factor` is",
        ),
        ("Olmo3", json!(7), "`rope_parameters.sliding_attention` is missing"),
        ("Qwen3", plain(9.0), "`rope_parameters.full_attention` is set"),
    ] {
        let error = read(family, &yarn, sliding).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn phi3_has_fused_projections() {
    let phi = |changes: Value| {
        let mut file = json!({"architectures": ["Phi3ForCausalLM"], "hidden_size": 32});
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    let silent = phi(json!({"attention_bias": true, "embd_pdrop": 0.5})).unwrap();
    assert!(silent.fused_projections && !silent.qkv_bias && !silent.o_bias);
    assert_eq!((silent.rms_norm_eps, silent.num_key_value_heads, silent.rotary_dim()), (1e-5, 2, 16));
    assert_eq!(silent.sliding_window, None);
    let partly = phi(json!({"partial_rotary_factor": 0.75, "sliding_window": 8})).unwrap();
    assert_eq!((partly.rotary_dim(), partly.sliding_window.unwrap().layers), (12, vec![true]));
    for (changes, expected) in [
        (json!({"resid_pdrop": 0.1}), "`resid_pdrop` is not 0"),
        (json!({"partial_rotary_factor": 0.2}), "`partial_rotary_factor` is 0.2, must be"),
        (json!({"rope_scaling": {"type": "yarn", "factor": 2.0}}), "`rope_scaling.factor` is 2, but max_pos"),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2.0}}),
            "`rope_scaling.rope_type` is `linear`, but",
        ),
        (json!({"architectures": ["PhimoeForCausalLM"]}), "the architecture PhimoeForCausalLM"),
    ] {
        let error = phi(changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// In the format of `transformers` 4, with the two lengths at the top level, and of 5, with everything in one
/// section.
#[test]
fn longrope_is_that_of_short_texts() {
    let phi = |changes: Value| {
        let mut file = json!({
            "architectures": ["Phi3ForCausalLM"], "hidden_size": 32, "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25, "original_max_position_embeddings": 64,
        });
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    let (short, long) = (json!([1.0, 1.5]), json!([2.0, 40.5]));
    let old = json!({"type": "longrope", "short_factor": short, "long_factor": long});
    let expected = RopeScaling::LongRope {
        short_factor: vec![1.0, 1.5],
        long_factor: vec![2.0, 40.5],
        original_max_position_embeddings: 64.0,
        max_position_embeddings: 4096.0,
        attention_factor: None,
    };
    let found = phi(json!({"rope_scaling": old})).unwrap();
    assert_eq!((&found.rope_scaling, found.max_position_embeddings), (&expected, 64));
    assert!(found.why_no_longer().contains("`long_factor`"));
    let mut new = json!({
        "rope_type": "longrope", "short_factor": short, "long_factor": long, "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25, "original_max_position_embeddings": 64,
    });
    let moved = json!({
        "rope_parameters": new, "partial_rotary_factor": null, "original_max_position_embeddings": null,
    });
    assert_eq!(phi(moved).unwrap(), found);
    let written = crate::hf::config_file(&found, &[1]).unwrap();
    for (name, value) in [("rope_scaling", &old), ("max_position_embeddings", &json!(4096))] {
        assert_eq!(&written[name], value);
    }
    assert_eq!(written["original_max_position_embeddings"], 64);
    assert_eq!(written["partial_rotary_factor"], 0.25);
    for name in ["su", "yarn"] {
        let older = json!({"type": name, "short_factor": short, "long_factor": long});
        assert_eq!(phi(json!({"rope_scaling": older})).unwrap(), found);
    }
    new["attention_factor"] = json!(1.25);
    let given = phi(json!({"rope_parameters": new})).unwrap();
    let written = crate::hf::config_file(&given, &[1]).unwrap();
    assert_eq!(written["rope_scaling"]["attention_factor"], 1.25);
    let mut check = |name: &str, value: Value, expected: &str| {
        let kept = new[name].take();
        new[name] = value;
        let error = phi(json!({"rope_parameters": new})).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        new[name] = kept;
    };
    check("short_factor", Value::Null, "`rope_parameters.short_factor` is not a list of numbers");
    check("long_factor", json!([1.0, "2"]), "`rope_parameters.long_factor` is not a list of numbers");
    check(
        "long_factor",
        json!([1.0]),
        "`rope_scaling` has 1 numbers for long_factor, must have one for each of the 2",
    );
    check("short_factor", json!([1.0, 0.0]), "`rope_scaling` has 0.0 for short_factor, must be a positive");
    check("original_max_position_embeddings", json!(32), "embeddings` is 32, but 64 next to `rope_scaling`");
    check("factor", json!(32.0), "`rope_parameters.factor` is 32, but max_position_embeddings");
    let other =
        json!({"rope_scaling": old, "architectures": ["LlamaForCausalLM"], "partial_rotary_factor": 1});
    let error = phi(other).unwrap_err().to_string();
    assert!(error.contains("`rope_scaling.rope_type` is `longrope`, must be"), "{error}");
    let llama = DecoderConfig { fused_projections: false, ..found };
    let error = crate::hf::config_file(&llama, &[1]).unwrap_err().to_string();
    assert!(error.contains("`rope_scaling` is `longrope`, which only Phi-3 has"), "{error}");
}

#[test]
fn granite_multiplies() {
    let granite = |changes: Value| {
        let mut file = json!({"architectures": ["GraniteForCausalLM"]});
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    let silent = granite(json!({})).unwrap();
    assert_eq!(silent.multipliers, Multipliers { attention: Some(1.0), ..Multipliers::default() });
    assert_eq!((silent.num_key_value_heads, silent.tie_word_embeddings), (2, false));
    let fields = json!({
        "embedding_multiplier": 12.0, "attention_multiplier": 0.5, "residual_multiplier": 0.22,
        "logits_scaling": 8,
    });
    let expected = Multipliers {
        embedding: 12.0,
        attention: Some(0.5),
        residual: 0.22,
        logits_scaling: 8.0,
        ..Multipliers::default()
    };
    assert_eq!(granite(fields.clone()).unwrap().multipliers, expected);
    assert_eq!(read(fields).unwrap().multipliers, Multipliers::default(), "Llama ignores them");
    let error = granite(json!({"logits_scaling": 0.0})).unwrap_err().to_string();
    assert!(error.contains("`logits_scaling` is 0, must be a positive number"), "{error}");
}

#[test]
fn gemma_is_read_as_it_is_published_and_as_newer_files_have_it() {
    let gemma = |changes: Value| {
        let mut file = json!({
            "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "num_key_value_heads": 1, "hidden_size": 20,
            "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512,
        });
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    let published = gemma(json!({
        "head_dim": 8, "query_pre_attn_scalar": 16, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": null,
        "sliding_window_pattern": 6, "attn_logit_softcapping": null, "final_logit_softcapping": null,
    }));
    let published = published.unwrap();
    let slides = vec![true, true, true, true, true, false, true];
    assert_eq!(published.sliding_window, Some(SlidingWindow { tokens: 512, layers: slides.clone() }));
    assert_eq!(published.other_rope, Some(OtherRope { theta: Some(1e4), layers: slides.clone() }));
    let expected = Multipliers {
        embedding: 20f64.sqrt(),
        rounds_embedding: true,
        attention: Some(0.25),
        ..Multipliers::default()
    };
    assert_eq!((published.multipliers, published.rope_theta), (expected, 1e6));
    assert_eq!((published.norms, published.norm_offset), (NormPlaces::Both, 1.0));
    assert_eq!((published.activation, published.qk_norm), (Activation::GeluTanh, Some(QkNorm::PerHead)));
    assert!(published.tie_word_embeddings && !published.qkv_bias);
    // Missing fields default to those of its class.
    let silent = gemma(json!({"head_dim": 8, "query_pre_attn_scalar": 16})).unwrap();
    assert_eq!(silent, published);
    assert_eq!(gemma(json!({})).unwrap().head_dim, 256);
    // In the format of transformers 5, and with the layers named.
    let kinds: Vec<&str> =
        slides.iter().map(|&it| if it { "sliding_attention" } else { "full_attention" }).collect();
    let newer = gemma(json!({
        "head_dim": 8, "query_pre_attn_scalar": 16, "layer_types": kinds, "_sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default"},
        },
    }));
    let scaled = DecoderConfig { rope_scaling: RopeScaling::Linear { factor: 8.0 }, ..published };
    assert_eq!(newer.unwrap(), scaled);
    for (changes, problem) in [
        (json!({"hidden_activation": "gelu"}), "`hidden_activation` must be `gelu_pytorch_tanh`"),
        (json!({"final_logit_softcapping": 30.0}), "`final_logit_softcapping` is set"),
        (json!({"attn_logit_softcapping": 50.0}), "`attn_logit_softcapping` is set"),
        (json!({"use_bidirectional_attention": true}), "`use_bidirectional_attention` is true"),
        (json!({"query_pre_attn_scalar": 0}), "`query_pre_attn_scalar` is 0, must be above 0"),
        (json!({"sliding_window_pattern": 0}), "`sliding_window_pattern` is 0"),
        (json!({"sliding_window": null}), "`sliding_window` is null"),
        // Its other fields are in `text_config`.
        (
            json!({"architectures": ["Gemma3ForConditionalGeneration"], "vocab_size": null, "text_config": {}}),
            "`architectures` are Gemma3ForConditionalGeneration, which reads images: load its text model",
        ),
        (json!({"architectures": ["Gemma3Model"]}), "Gemma3Model"),
    ] {
        let error = gemma(changes).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    assert!(gemma(json!({"architectures": ["Gemma3TextModel"]})).is_ok());
    let [of_texts, of_steps] = [ValueHead::Number, ValueHead::Classes].map(Task::Value);
    assert_eq!(of_texts.of_language("Gemma3ForCausalLM"), "Gemma3TextForSequenceClassification");
    assert_eq!(of_texts.of_language("Qwen2ForCausalLM"), "Qwen2ForSequenceClassification");
    assert_eq!(of_steps.of_language("Qwen2ForCausalLM"), "Qwen2ForTokenClassification");
}

#[test]
fn experts_are_of_layers() {
    let moe = |changes: Value| {
        let mut file = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 1, "num_hidden_layers": 4,
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        });
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    let layers = |changes: Value| moe(changes).unwrap().experts.map(|experts| experts.layers);
    let all = moe(json!({})).unwrap();
    assert!(
        all.qk_norm == Some(QkNorm::PerHead)
            && !all.o_bias
            && all.head_dim == 8
            && all.sliding_window.is_none()
    );
    let experts = all.experts.unwrap();
    assert_eq!((experts.num_experts, experts.num_experts_per_tok), (8, 2));
    assert_eq!((experts.moe_intermediate_size, experts.norm_topk_prob), (12, false));
    assert_eq!(experts.layers, [true; 4]);
    assert_eq!(layers(json!({"decoder_sparse_step": 2})), Some(vec![false, true, false, true]));
    assert_eq!(layers(json!({"mlp_only_layers": [0, 9]})), Some(vec![false, true, true, true]));
    assert_eq!(layers(json!({"decoder_sparse_step": 5})), None);
    assert_eq!(layers(json!({"num_experts": 0})), None);
    assert!(moe(json!({"norm_topk_prob": true})).unwrap().experts.unwrap().norm_topk_prob);
    let windowed = moe(json!({"use_sliding_window": true, "sliding_window": 8})).unwrap();
    assert_eq!(windowed.sliding_window.unwrap().layers, [true; 4], "max_window_layers has no effect");
    let check = |changes: Value, expected: &str| {
        let error = moe(changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    assert_eq!(layers(json!({"output_router_logits": true})), layers(json!({})));
    check(json!({"output_router_logits": 1}), "output_router_logits");
    check(json!({"num_experts": null}), "`num_experts` is missing");
    check(json!({"num_local_experts": 7}), "`num_local_experts` is 7, and `num_experts` is 8");
    let newer = moe(json!({"num_experts": null, "num_local_experts": 8})).unwrap().experts.unwrap();
    assert_eq!(newer.num_experts, 8);
    check(json!({"moe_intermediate_size": null}), "`moe_intermediate_size` is missing");
    check(json!({"num_experts_per_tok": 9}), "`num_experts_per_tok` is 9, must be at most num_experts = 8");
    check(json!({"decoder_sparse_step": 0}), "`decoder_sparse_step` is 0");
}

#[test]
fn mixtral_and_olmoe_have_experts_in_all_layers() {
    let moe = |family: &str, changes: Value| {
        let mut file = json!({
            "architectures": [format!("{family}ForCausalLM")], "num_key_value_heads": 1,
            "num_hidden_layers": 2, "num_experts_per_tok": 2, "rms_norm_eps": null, "rope_theta": null,
        });
        let count = if family == "Mixtral" { "num_local_experts" } else { "num_experts" };
        file[count] = json!(8);
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    let mixtral = moe("Mixtral", json!({"mlp_only_layers": [0], "attention_bias": true})).unwrap();
    assert_eq!((mixtral.rms_norm_eps, mixtral.rope_theta), (1e-5, 1e6));
    assert_eq!((mixtral.qkv_bias, mixtral.qk_norm, &mixtral.sliding_window), (false, None, &None));
    let experts = mixtral.experts.unwrap();
    assert_eq!((experts.num_experts, experts.moe_intermediate_size), (8, mixtral.intermediate_size));
    assert!(experts.norm_topk_prob && experts.layers == [true; 2]);
    assert_eq!(experts.names, ExpertNames::Mixtral);
    let windowed = moe("Mixtral", json!({"sliding_window": 8})).unwrap().sliding_window.unwrap();
    assert_eq!((windowed.tokens, windowed.layers), (8, vec![true; 2]));

    let olmoe = moe("Olmoe", json!({"attention_bias": true, "clip_qkv": null})).unwrap();
    assert_eq!((olmoe.rms_norm_eps, olmoe.rope_theta), (1e-5, 1e4));
    assert_eq!((olmoe.qk_norm, olmoe.norms), (Some(QkNorm::Together), NormPlaces::Before));
    assert!(olmoe.qkv_bias && olmoe.o_bias);
    let experts = olmoe.experts.unwrap();
    assert!(!experts.norm_topk_prob && experts.layers == [true; 2]);
    assert_eq!(experts.names, ExpertNames::Usual);

    for (family, changes, expected) in [
        ("Mixtral", json!({"num_local_experts": null}), "`num_local_experts` is missing"),
        ("Mixtral", json!({"num_local_experts": 0}), "`num_local_experts` is 0"),
        ("Mixtral", json!({"router_jitter_noise": 0.1}), "`router_jitter_noise` is not 0"),
        ("Olmoe", json!({"num_experts": null}), "`num_experts` is missing"),
        ("Olmoe", json!({"clip_qkv": 8.0}), "`clip_qkv` is set"),
    ] {
        let error = moe(family, changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn layers_that_libtorch_differentiates_are_read() {
    let latent = |changes: Value| {
        let mut file = json!({"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "sigmoid"});
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    let of = |changes: Value| match latent(changes).unwrap().expressed {
        Some(Expressed::DeepseekV3(of)) => of,
        other => panic!("{other:?}"),
    };
    let DeepseekV3 { q_lora_rank, pairs, n_group, topk_group, norm_topk_prob, .. } = of(json!({}));
    assert_eq!((q_lora_rank, pairs, n_group, topk_group), (Some(1536), Pairs::Adjacent, 8, 4));
    assert!(norm_topk_prob);
    let silent = latent(json!({})).unwrap();
    assert_eq!((silent.head_dim, silent.rotary_dim(), silent.num_key_value_heads), (192, 64, 2));
    assert_eq!(of(json!({"q_lora_rank": null})).q_lora_rank, None);
    // The softmax's scale grows with the factor, squared.
    let yarn = json!({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0});
    let grown = latent(json!({"rope_scaling": yarn})).unwrap().attention_multiplier();
    let expected = (0.1 * 40f64.ln() + 1.0).powi(2) / 192f64.sqrt();
    assert!((grown - expected).abs() < 1e-12, "{grown} {expected}");
    for (changes, expected) in [
        (json!({"scoring_func": "softmax"}), "`scoring_func` must be `sigmoid`"),
        (json!({"topk_method": "greedy"}), "`topk_method` must be `noaux_tc`"),
        (json!({"moe_layer_freq": 2}), "`moe_layer_freq` is 2, must be 1"),
        (json!({"num_key_value_heads": 1}), "`num_key_value_heads` is 1, must be the 2 heads"),
        (json!({"v_head_dim": 193}), "`v_head_dim` is 193, must be at most the 192"),
        (json!({"qk_rope_head_dim": 63}), "`qk_rope_head_dim` is 63, must be even"),
        (json!({"n_group": 256}), "`n_group` is 256, must divide n_routed_experts = 256"),
        (json!({"topk_group": 9}), "`topk_group` is 9, must be at most n_group = 8"),
        (json!({"num_experts_per_tok": 129}), "`num_experts_per_tok` is 129, but a token's groups have 128"),
        (json!({"n_shared_experts": 0}), "`n_shared_experts` is 0, must be 1 to"),
        (json!({"architectures": ["DeepseekV2ForCausalLM"]}), "which has another router"),
    ] {
        let error = latent(changes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let glm = |changes: Value| {
        let mut file = json!({"architectures": ["Glm4ForCausalLM"], "num_key_value_heads": 1, "head_dim": 8});
        file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(file)
    };
    assert_eq!(glm(json!({})).unwrap().rotary_dim(), 4);
    let new = json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}});
    assert_eq!(glm(new).unwrap().rotary_dim(), 6);
    let error = glm(json!({"architectures": ["GlmForCausalLM"]})).unwrap_err().to_string();
    assert!(error.contains("other norms than `Glm4ForCausalLM`"), "{error}");
}

#[test]
fn rope_is_read_from_either_place() {
    let linear = RopeScaling::Linear { factor: 2.0 };
    let old = read(json!({"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
    assert_eq!((old.rope_theta, &old.rope_scaling), (50.0, &linear));
    let parameters = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0});
    let new = read(json!({"rope_parameters": parameters})).unwrap();
    assert_eq!((new.rope_theta, &new.rope_scaling), (50.0, &linear));
    let same = json!({"type": "linear", "factor": 2.0});
    let both = read(json!({"rope_parameters": parameters, "rope_scaling": same})).unwrap();
    assert_eq!((both.rope_theta, both.rope_scaling), (50.0, linear));
    let unnamed = read(json!({"rope_parameters": {"rope_theta": 50.0}})).unwrap();
    assert_eq!((unnamed.rope_theta, unnamed.rope_scaling), (50.0, RopeScaling::None));
    let llama3 =
        json!({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    match read(json!({"rope_parameters": llama3})).unwrap().rope_scaling {
        RopeScaling::Llama3 { original_max_position_embeddings, .. } => {
            assert_eq!(original_max_position_embeddings, 64.0);
        }
        other => panic!("{other:?}"),
    }
}

/// Fields of published files that change no value, each from a report.
#[test]
fn fields_that_change_nothing_are_read() {
    let plain = read(json!({})).unwrap();
    for changes in [
        json!({"pretraining_tp": 1}),
        json!({"dtype": "auto"}),
        json!({"torch_dtype": "auto"}),
        json!({"eos_token_id": [1, 2]}),
        json!({"text_config": {"hidden_size": 99}}),
    ] {
        assert_eq!(read(changes.clone()).unwrap(), plain, "{changes}");
    }
    let yarn = |more: Value| {
        let mut yarn = json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32});
        yarn.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(json!({"rope_scaling": yarn})).unwrap().rope_scaling
    };
    assert_eq!(yarn(json!({"type": "yarn", "finetuned": true})), yarn(json!({})));
}

#[test]
fn what_is_missing_is_named() {
    let check = |changes: Value, expected: &str| {
        let error = read(changes).unwrap_err().to_string();
        assert!(error.starts_with("m/config.json: ") && error.contains(expected), "{error}");
    };
    check(
        json!({"architectures": ["GemmaForCausalLM"]}),
        "the architecture GemmaForCausalLM is not supported",
    );
    check(json!({"architectures": null}), "the architecture (none)");
    let scorer = json!({"architectures": ["LlamaForSequenceClassification"]});
    check(scorer, "the architecture LlamaForSequenceClassification is not supported, only Qwen2ForCausalLM");
    check(json!({"architectures": ["MistralForCausalLM"]}), "`num_key_value_heads` is missing");
    check(json!({"num_key_value_heads": 3}), "`num_key_value_heads` is 3, must divide");
    check(json!({"hidden_size": 1_i64 << 60}), "`hidden_size` is 1152921504606846976, must be at most");
    check(json!({"hidden_act": "gelu"}), "`hidden_act` must be `silu`");
    check(json!({"quantization_config": {}}), "`quantization_config` is set");
    let yarn = json!({"rope_type": "yarn", "factor": 2.0});
    let plain = json!({"rope_type": "default", "rope_theta": 50.0});
    check(
        json!({"rope_parameters": plain, "rope_scaling": yarn}),
        "`rope_scaling` differs from `rope_parameters`",
    );
    let half = json!({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5});
    check(json!({"rope_parameters": half}), "`rope_parameters.partial_rotary_factor` is not 1");
    check(json!({"rope_scaling": {"rope_type": 1}}), "`rope_scaling.rope_type` is no text, must be");
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "truncate": "no"});
    check(json!({"rope_scaling": yarn}), "`rope_scaling.truncate` is \"no\"");
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.0});
    check(json!({"rope_scaling": yarn}), "`rope_scaling` has 0.0 for beta_fast");
    check(json!({"num_hidden_layers": 10_000_000}), "`num_hidden_layers` is 10000000, must be at most");
    check(json!({"max_position_embeddings": 1_000_000_000}), "`max_position_embeddings` is 1000000000");
    check(json!({"rope_scaling": {"rope_type": "longrope"}}), "`rope_scaling.rope_type` is `longrope`");
    check(json!({"rope_scaling": {"rope_type": "linear"}}), "`rope_scaling.factor` is missing");
    check(json!({"rope_scaling": {"rope_type": "linear", "factor": "2"}}), "`rope_scaling.factor` is \"2\"");
}
