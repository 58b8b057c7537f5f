use serde_json::json;

use super::*;

/// Expected values are from Python's `tokenizers` package: tests/python/make_tiny_model.py.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny_model")
}

/// Expected values are from Python's `tokenizers` and `sentencepiece`: tests/python/make_gguf_golden.py.
#[test]
fn metadata_of_gguf_files_cuts_texts_as_in_python() {
    let golden = folder().join("../gguf");
    let expected: Value = serde_json::from_slice(&fs::read(golden.join("tokens.json")).unwrap()).unwrap();
    let expected = expected.as_object().unwrap();
    assert_eq!(expected.len(), 5);
    for (name, cases) in expected {
        let tokenizer = HfTokenizer::open(&golden.join(format!("{name}.gguf"))).unwrap();
        for case in cases.as_array().unwrap() {
            let (text, ids) = (case["text"].as_str().unwrap(), case["ids"].as_array().unwrap());
            let found = tokenizer.encode(text, true).unwrap();
            assert_eq!(
                &found,
                &ids.iter().map(|id| id.as_i64().unwrap()).collect::<Vec<_>>(),
                "{name}: {text}"
            );
            if let Some(decoded) = case["decoded"].as_str() {
                assert_eq!(tokenizer.decode(&found).unwrap(), decoded, "{name}");
            }
        }
    }
    let (file, folder) =
        (HfTokenizer::open(&golden.join("llama.gguf")), HfTokenizer::open(&golden.join("llama")));
    let (file, folder) = (file.unwrap(), folder.unwrap());
    assert_eq!(
        (file.eos(), file.pad(), file.vocabulary()),
        (folder.eos(), folder.pad(), folder.vocabulary())
    );
    let messages = [json!({"role": "user", "content": "What is 1+1?"})];
    let conversation = Conversation { messages: &messages, ..Conversation::default() };
    let rendered = file.render_chat(conversation, &Map::new()).unwrap();
    assert_eq!(rendered, folder.render_chat(conversation, &Map::new()).unwrap());
    assert!(rendered.contains("1+1"), "{rendered}");
}

#[test]
fn texts_are_cut_as_in_python_and_come_back() {
    let tokenizer = HfTokenizer::open(&folder()).unwrap();
    let golden = fs::read(folder().join("tokens.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let ids = |value: &Value| -> Vec<i64> { serde_json::from_value(value.clone()).unwrap() };
    for case in golden["texts"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids(&case["ids"]), "{text}");
        assert_eq!(tokenizer.decode(&ids(&case["ids"])).unwrap(), case["decoded"], "{text}");
    }
    for case in golden["chats"].as_array().unwrap() {
        let conversation = Conversation {
            messages: case["messages"].as_array().unwrap(),
            tools: None,
            add_generation_prompt: true,
        };
        let found = tokenizer.encode_chat(conversation, &Map::new()).unwrap();
        assert_eq!(found, ids(&case["ids"]), "{case}");
    }
    assert_eq!(tokenizer.eos(), golden["eos"].as_i64());
    assert_eq!(tokenizer.decode(&[1 << 20, -1]).unwrap(), "");
}

/// Expected tokens are from transformers 5.24 with such a folder (`PreTrainedTokenizerFast`).
#[test]
fn tokens_that_only_the_config_names_are_added() {
    let scratch = tempfile::tempdir().unwrap();
    fs::copy(folder().join("tokenizer.json"), scratch.path().join("tokenizer.json")).unwrap();
    let token = |content: &str, lstrip: bool| {
        json!({"content": content, "lstrip": lstrip, "rstrip": false, "normalized": false, "single_word": false,
               "special": true})
    };
    let config = json!({
        "added_tokens_decoder": {"323": token("<second>", true), "322": token("<first>", false)},
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<third>"],
    });
    fs::write(scratch.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let tokenizer = HfTokenizer::open(scratch.path()).unwrap();
    let text = "a <first> b  <second> c<third><pad><|im_end|>";
    let ids = [64, 220, 322, 220, 65, 323, 220, 66, 325, 324, 321];
    assert_eq!(tokenizer.encode(text, true).unwrap(), ids);
    assert_eq!(tokenizer.decode(&ids).unwrap(), "a  b c");
    assert_eq!((tokenizer.special_token("<third>"), tokenizer.eos()), (Some(325), Some(321)));
}

/// Special tokens as older and newer files write them: texts, objects, lists, objects by name, or none.
#[test]
fn special_tokens_are_read_in_every_spelling() {
    let scratch = tempfile::tempdir().unwrap();
    fs::copy(folder().join("tokenizer.json"), scratch.path().join("tokenizer.json")).unwrap();
    let plain = HfTokenizer::open(scratch.path()).unwrap();
    assert_eq!((plain.eos(), plain.encode("a", true).unwrap()), (None, vec![64]));
    let object = json!({"content": "<|im_end|>", "lstrip": false, "rstrip": false, "normalized": false});
    for config in [
        json!({"eos_token": object}),
        json!({"eos_token": "<|im_end|>", "pad_token": null}),
        json!({"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]}),
        json!({"eos_token": "<|im_end|>", "extra_special_tokens": {"image_token": "<|im_start|>"}}),
    ] {
        fs::write(scratch.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokenizer = HfTokenizer::open(scratch.path()).unwrap();
        assert_eq!(tokenizer.eos(), Some(321), "{config}");
        assert_eq!(tokenizer.encode("a<|im_end|>", true).unwrap(), [64, 321], "{config}");
    }
}

/// `transformers` encodes what a template rendered with `add_special_tokens=False`.
#[test]
fn a_token_that_the_template_and_the_tokenizer_add_is_there_once() {
    let scratch = tempfile::tempdir().unwrap();
    let content = fs::read(folder().join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&content).unwrap();
    let (first, text) = ("<|im_start|>", json!({"Sequence": {"id": "A", "type_id": 0}}));
    let id = tokenizer["added_tokens"].as_array().unwrap().iter().find(|token| token["content"] == first);
    let id = id.unwrap()["id"].as_i64().unwrap();
    let added = json!({"SpecialToken": {"id": first, "type_id": 0}});
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [added, text],
        "pair": [added, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {first: {"id": first, "ids": [id], "tokens": [first]}},
    });
    fs::write(scratch.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({"bos_token": first, "chat_template": "{{ bos_token }}{{ messages[0].content }}"});
    fs::write(scratch.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let tokenizer = HfTokenizer::open(scratch.path()).unwrap();
    let messages = [json!({"role": "user", "content": "two"})];
    let conversation = Conversation { messages: &messages, ..Conversation::default() };
    let chat = tokenizer.encode_chat(conversation, &Map::new()).unwrap();
    assert_eq!(chat, tokenizer.encode("two", true).unwrap());
    assert_eq!(chat[1..], tokenizer.encode("two", false).unwrap());
    assert_eq!(chat[0], id);
}

#[test]
fn conversations_with_tools_may_have_a_template_of_their_own() {
    let scratch = tempfile::tempdir().unwrap();
    fs::copy(folder().join("tokenizer.json"), scratch.path().join("tokenizer.json")).unwrap();
    let named = |name: &str, template: &str| json!({"name": name, "template": template});
    let config = json!({"chat_template": [named("tool_use", "tools"), named("default", "plain")]});
    fs::write(scratch.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let tokenizer = HfTokenizer::open(scratch.path()).unwrap();
    let render = |tools| {
        let conversation = Conversation { tools, ..Conversation::default() };
        tokenizer.render_chat(conversation, &Map::new()).unwrap()
    };
    assert_eq!([render(None), render(Some(&[json!({})]))], ["plain", "tools"]);
    let processors = json!({"chat_template": "processor's"}).to_string();
    fs::write(scratch.path().join("chat_template.json"), processors).unwrap();
    let rendered =
        HfTokenizer::open(scratch.path()).unwrap().render_chat(Conversation::default(), &Map::new());
    assert_eq!(rendered.unwrap(), "processor's");
}

#[test]
fn broken_folders_are_refused_by_name() {
    type Damage<'a> = &'a dyn Fn(&Path);
    let check = |damage: Damage, expected: &[&str]| {
        let scratch = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(folder()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), scratch.path().join(entry.file_name())).unwrap();
        }
        damage(scratch.path());
        let messages = [json!({"role": "user", "content": "a"})];
        let conversation = Conversation { messages: &messages, ..Conversation::default() };
        let opened = HfTokenizer::open(scratch.path());
        let error = opened.and_then(|it| it.encode_chat(conversation, &Map::new())).unwrap_err().to_string();
        assert!(expected.iter().all(|word| error.contains(word)), "{error} has not {expected:?}");
    };
    let tokenizer = "tokenizer.json";
    check(&|folder| fs::remove_file(folder.join(tokenizer)).unwrap(), &["cannot read", tokenizer]);
    let pieces = |folder: &Path| fs::rename(folder.join(tokenizer), folder.join("spiece.model")).unwrap();
    check(&pieces, &["has a spiece.model but no tokenizer.json", "save_pretrained"]);
    let pieces = |folder: &Path| fs::rename(folder.join(tokenizer), folder.join("tokenizer.model")).unwrap();
    check(&pieces, &["has a tokenizer.model but no tokenizer.json", "save_pretrained"]);
    check(&|folder| fs::write(folder.join(tokenizer), "{}").unwrap(), &[tokenizer, "is invalid"]);
    let config = "tokenizer_config.json";
    check(&|folder| fs::write(folder.join(config), "[").unwrap(), &[config, "is invalid"]);
    check(&|folder| fs::write(folder.join(config), "{}").unwrap(), &["has no chat template"]);
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n";
    check(&|folder| fs::write(folder.join(tokenizer), pointer).unwrap(), &[tokenizer, "git lfs pull"]);
    let panics = |folder: &Path| {
        let text = fs::read_to_string(folder.join(tokenizer)).unwrap();
        let mut value: Value = serde_json::from_str(&text).unwrap();
        value["decoder"] = json!({"type": "?"});
        fs::write(folder.join(tokenizer), value.to_string().replace("\"?\"", "\"\\ud800\"")).unwrap();
    };
    check(&panics, &[tokenizer, "is invalid", "its reader fails"]);
    let template = "chat_template.jinja";
    check(&|folder| fs::write(folder.join(template), "{% if %}").unwrap(), &[template, "cannot be read"]);
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    check(&|folder| fs::write(folder.join(template), endless).unwrap(), &[template, "refuses the messages"]);
    let raises = json!({"chat_template": [{"name": "default", "template": "{{ raise_exception('no') }}"}]});
    check(&|folder| fs::write(folder.join(config), raises.to_string()).unwrap(), &["refuses the messages"]);
}

#[test]
fn tokens_without_a_row_in_the_embedding_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    fs::copy(folder().join("tokenizer.json"), scratch.path().join("tokenizer.json")).unwrap();
    let tokenizer = HfTokenizer::open(scratch.path()).unwrap();
    let last = tokenizer.vocabulary().pop().unwrap();
    tokenizer.fits(last.1 + 1).unwrap();
    let error = tokenizer.fits(last.1).unwrap_err().to_string();
    let token = format!("tokenizer.json has token {}, `{}`", last.1, last.0);
    assert!(error.contains(&token) && error.contains(&format!("only {} rows", last.1)), "{error}");
    // A model of text alone may keep the token of a picture.
    let config = json!({"image_token": last.0}).to_string();
    fs::write(scratch.path().join("tokenizer_config.json"), config).unwrap();
    HfTokenizer::open(scratch.path()).unwrap().fits(last.1).unwrap();
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    #[test]
    fn a_damaged_tokenizer_never_panics(
        damage in proptest::collection::vec((0_usize..1 << 20, proptest::prelude::any::<u8>()), 1..8),
        cut in proptest::option::of(0_usize..1 << 16),
    ) {
        let scratch = tempfile::tempdir().unwrap();
        let mut content = fs::read(folder().join("tokenizer.json")).unwrap();
        for (at, byte) in damage {
            let at = at % content.len();
            content[at] = byte;
        }
        content.truncate(cut.unwrap_or(content.len()));
        fs::write(scratch.path().join("tokenizer.json"), content).unwrap();
        if let Ok(tokenizer) = HfTokenizer::open(scratch.path()) {
            let tokens = tokenizer.encode("two and 2 <|im_end|>", true).unwrap_or_default();
            let _ = (tokenizer.decode(&tokens), tokenizer.token_bytes());
        }
    }
}
