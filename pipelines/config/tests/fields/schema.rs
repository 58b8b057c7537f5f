//! The sections as a JSON Schema (2020-12), which editors complete and check configs by.

use anyroll_config::READY;
use regex::Regex;
use serde_json::{Map, Value, json};

use super::sections::{Row, Section, Sections, parts};

/// Returns the schema of a config.
pub fn schema(all: &Sections) -> Value {
    let mut definitions = Map::new();
    let mut next = vec!["Config".to_owned()];
    while let Some(name) = next.pop() {
        // Values of these types have their schema in place.
        if definitions.contains_key(&name) || ["Steps", "Paths", "Listen"].contains(&name.as_str()) {
            continue;
        }
        let Some(section) = all.get(&name) else { continue };
        definitions.insert(name.clone(), definition(&name, section, all));
        next.extend(section.rows.iter().flat_map(|row| parts(&row.kind)).map(str::to_owned));
    }
    definitions.sort_keys();
    let root = definitions.remove("Config").expect("a config has a section");
    let mut schema = Map::new();
    schema.insert("$schema".into(), "https://json-schema.org/draft/2020-12/schema".into());
    schema.insert("title".into(), "A config of anyroll".into());
    schema.extend(root.as_object().expect("it has fields").clone());
    schema.insert("$defs".into(), definitions.into());
    schema.into()
}

fn definition(name: &str, section: &Section, all: &Sections) -> Value {
    let described = |mut schema: Value| {
        schema["description"] = section.doc.replace("\\|", "|").into();
        schema
    };
    let rows = |name: &str| &all[name].rows;
    described(match name {
        "ModelConfig" => one_of_models(all),
        "ZeroStage" => json!({"enum": [0, 1, 2, 3, "auto"]}),
        "ShardGroup" => json!({"anyOf": [whole(1), {"enum": ["all", "host"]}]}),
        "Devices" => json!({"anyOf": [whole(0), {"const": "all"}, list(whole(0))]}),
        "RewardConfig" => {
            let words = without_fields(rows("RewardKind"), all);
            let words: Vec<&String> = words.into_iter().filter(|word| *word != "environment").collect();
            json!({"anyOf": [{"enum": words}, {"type": "array", "minItems": 1, "items": reference("RewardTerm")}]})
        }
        "ImageRewardConfig" => {
            json!({"anyOf": [reference("ImageReward"), {"type": "array", "minItems": 1, "items": reference("ImageTerm")}]})
        }
        "RewardTerm" => term(&section.rows, rows("RewardKind"), all),
        "ImageTerm" => term(&section.rows, rows("ImageReward"), all),
        "StrategyConfig" | "StrategyOverride" => with_include(object(&section.rows, all)),
        _ if section.is_choice => choice(&section.rows, all),
        _ => object(&section.rows, all),
    })
}

/// Returns the object of a section: its fields, and no others.
fn object(rows: &[Row], all: &Sections) -> Value {
    let properties: Map<String, Value> =
        rows.iter().map(|row| (row.name.clone(), property(row, all))).collect();
    let required: Vec<&String> = rows.iter().filter(|row| !row.is_optional).map(|row| &row.name).collect();
    let mut object = json!({"type": "object", "properties": properties, "additionalProperties": false});
    if !required.is_empty() {
        object["required"] = json!(required);
    }
    object
}

/// Returns the schema of a choice: its name alone if no field must be given, or a mapping from its name to its fields.
fn choice(rows: &[Row], all: &Sections) -> Value {
    let words: Vec<Value> = rows
        .iter()
        .filter(|row| !row.is_untagged && is_word(row, all))
        .map(|row| json!({"const": row.name, "description": text(&row.doc)}))
        .collect();
    let mappings = rows.iter().filter(|row| !row.kind.is_empty() && !row.is_untagged).map(|row| {
        let one = Row { is_optional: false, ..row.clone() };
        object(&[one], all)
    });
    let untagged = rows.iter().filter(|row| row.is_untagged).map(|row| value(&row.kind, all));
    json!({"anyOf": words.into_iter().chain(mappings).chain(untagged).collect::<Vec<_>>()})
}

/// Returns true if a choice may be written as a word.
fn is_word(row: &Row, all: &Sections) -> bool {
    row.kind.is_empty()
        || all.get(&row.kind).is_some_and(|it| !it.is_choice && it.rows.iter().all(|row| row.is_optional))
}

fn without_fields<'a>(rows: &'a [Row], all: &Sections) -> Vec<&'a String> {
    rows.iter().filter(|row| is_word(row, all) && row.kind != "LengthConfig").map(|row| &row.name).collect()
}

/// Returns the schema of a reward's term: one reward, and the fields of all terms.
fn term(fields: &[Row], rewards: &[Row], all: &Sections) -> Value {
    let of_reward = |row: &Row| {
        let kind = if row.kind.is_empty() { "NoFields" } else { &row.kind };
        Row { kind: kind.to_owned(), is_optional: true, ..row.clone() }
    };
    let fields = fields.iter().filter(|row| row.name != "kind").cloned();
    let rows: Vec<Row> = rewards.iter().map(of_reward).chain(fields).collect();
    let mut term = object(&rows, all);
    term["oneOf"] = rewards.iter().map(|row| json!({"required": [row.name]})).collect();
    term
}

/// Returns the schema of `model`, whose keys name the kind.
fn one_of_models(all: &Sections) -> Value {
    let single = |name: &str, kind: &str| {
        let doc = all[kind].doc.clone();
        let row = Row { name: name.into(), kind: kind.into(), doc, is_optional: false, is_untagged: false };
        object(&[row], all)
    };
    let mut diffusers = all["DiffusersConfig"].rows.clone();
    diffusers.iter_mut().filter(|row| row.name == "path").for_each(|row| row.name = "diffusers".into());
    json!({"anyOf": [
        single("decoder", "DecoderConfig"),
        object(&all["FolderConfig"].rows, all),
        single("dit", "DitConfig"),
        object(&diffusers, all),
    ]})
}

/// Adds the name of a ready strategy, which has every field that must be given.
fn with_include(mut strategy: Value) -> Value {
    strategy["properties"]["include"] = json!({
        "enum": READY.map(|(name, _)| name),
        "description": "Name of a ready strategy, whose fields the fields beside it override. Default: none.",
    });
    if let Some(required) = strategy.as_object_mut().and_then(|it| it.remove("required")) {
        strategy["anyOf"] = json!([{"required": required}, {"required": ["include"]}]);
    }
    strategy
}

/// Returns the schema of a field: its values, range, default and sentence.
fn property(row: &Row, all: &Sections) -> Value {
    let mut property = value(&row.kind, all);
    if let Some(kind) = property["type"].as_str().filter(|kind| ["integer", "number"].contains(kind)) {
        let kind = kind.to_owned();
        add_range(&mut property, &row.doc, &kind);
    }
    let inner = row.kind.strip_prefix("Option<").and_then(|it| it.strip_suffix('>'));
    if inner.is_some() {
        property = match property["type"].as_str() {
            Some(kind) => {
                property["type"] = json!([kind, "null"]);
                property
            }
            None => json!({"anyOf": [property, {"type": "null"}]}),
        };
    }
    if let Some(default) = default(row, inner.unwrap_or(&row.kind), all) {
        property["default"] = default;
    }
    property["description"] = text(&row.doc).into();
    property
}

/// Returns the schema of a type, without its range.
fn value(kind: &str, all: &Sections) -> Value {
    let inner = |prefix: &str| kind.strip_prefix(prefix).and_then(|rest| rest.strip_suffix('>'));
    if let Some(kind) = inner("Option<") {
        return value(kind, all);
    }
    if let Some(kind) = inner("Vec<") {
        return list(value(kind, all));
    }
    if let Some(kind) = inner("Steps<") {
        return json!({"anyOf": [whole(0), value(kind, all)]});
    }
    if let Some(kinds) = inner("BTreeMap<").or(inner("IndexMap<")) {
        let kind = kinds.split(", ").last().unwrap_or_default();
        return json!({"type": "object", "additionalProperties": value(kind, all)});
    }
    match kind {
        "u8" | "u16" | "u32" | "u64" | "usize" => whole(0),
        "i64" => json!({"type": "integer"}),
        "f64" => json!({"type": "number"}),
        "bool" => json!({"type": "boolean"}),
        "String" | "PathBuf" => json!({"type": "string"}),
        "tuple" => list(json!({"type": "number"})),
        "Paths" => json!({"anyOf": [{"type": "string"}, list(json!({"type": "string"}))]}),
        "Listen" => {
            json!({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, {"type": "string"}]})
        }
        name if all.contains_key(name) => reference(name),
        name => panic!("`{name}` has no schema: add it here"),
    }
}

fn whole(minimum: u8) -> Value {
    json!({"type": "integer", "minimum": minimum})
}

fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/$defs/{name}")})
}

fn text(doc: &str) -> String {
    doc.replace("\\|", "|")
}

/// Adds the range that a sentence has in one of the usual forms, such as `; above 0, at most 1`.
fn add_range(property: &mut Value, doc: &str, kind: &str) {
    const NUMBER: &str = r"(-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)";
    const END: &str = r"(?:[,;:] |\. |\.$|\)| \()";
    let bound = |pattern: &str| {
        let pattern = pattern.replace("{N}", NUMBER).replace("{END}", END);
        let found = Regex::new(&pattern).expect("a valid pattern").captures(doc)?;
        Some(
            found.iter().skip(1).flatten().map(|number| as_number(number.as_str(), kind)).collect::<Vec<_>>(),
        )
    };
    let forms: [(&str, &[&str]); 8] = [
        (r"[;,] (?:from )?{N} to {N}, both excluded", &["exclusiveMinimum", "exclusiveMaximum"]),
        (r"[;,] (?:from )?{N} to below {N}{END}", &["minimum", "exclusiveMaximum"]),
        (r"[;,] (?:from )?{N} to {N}{END}", &["minimum", "maximum"]),
        (r"[;,] above {N} and below {N}{END}", &["exclusiveMinimum", "exclusiveMaximum"]),
        (r"[;,] above {N}, at most {N}{END}", &["exclusiveMinimum", "maximum"]),
        (r"[;,] {N} or above{END}", &["minimum"]),
        (r"[;,] above {N}{END}", &["exclusiveMinimum"]),
        (r"[;,] at least {N}{END}", &["minimum"]),
    ];
    let found = forms.iter().find_map(|(pattern, names)| Some((bound(pattern)?, names)));
    for (number, name) in found.into_iter().flat_map(|(numbers, names)| numbers.into_iter().zip(*names)) {
        property[*name] = number;
    }
}

fn as_number(number: &str, kind: &str) -> Value {
    let whole = number.parse::<i64>().ok().filter(|_| kind == "integer" || !number.contains(['.', 'e']));
    whole.map_or_else(|| json!(number.parse::<f64>().expect("a number")), Value::from)
}

/// Returns the default that a sentence ends with, if it is one value: `Default 0.`, `Default token_mean.`
fn default(row: &Row, kind: &str, all: &Sections) -> Option<Value> {
    let pattern = Regex::new(r"Default (\[[^\]]*\]|[^ ]+?)\.(?: |$)").expect("a valid pattern");
    let written = pattern.captures(&row.doc)?[1].to_owned();
    let word = written.trim_matches('`');
    match kind {
        "String" | "PathBuf" => (word.len() < written.len()).then(|| word.into()),
        "bool" => word.parse::<bool>().ok().map(Value::from),
        "f64" => word.parse::<f64>().ok().map(|_| as_number(word, "number")),
        "u8" | "u16" | "u32" | "u64" | "usize" | "i64" | "ZeroStage" | "Devices" => {
            word.parse::<i64>().ok().map(Value::from)
        }
        "tuple" => serde_json::from_str(word).ok(),
        _ if kind.starts_with("Steps<") => word.parse::<i64>().ok().map(Value::from),
        _ => {
            let section = all.get(kind).filter(|it| it.is_choice)?;
            section.rows.iter().any(|row| row.name == word).then(|| word.into())
        }
    }
}
