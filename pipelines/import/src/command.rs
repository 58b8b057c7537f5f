//! Keys from a training command in a shell script: OpenRLHF's flags, verl's overrides.

use serde_json::{Map, Value};

use super::{
    Origin,
    shell::{self, Variables},
    values,
};

type Keys = Map<String, Value>;

/// A training program that is configured by its command.
#[derive(Debug)]
pub(super) struct Program {
    /// System that the program belongs to.
    pub(super) origin: Origin,
    /// Prefixes of the system's program names.
    packages: &'static [&'static str],
    /// Programs whose commands are imported. Others of the system have different trainers with the same
    /// arguments.
    names: &'static [&'static str],
    keys: fn(Vec<String>) -> Result<Keys, String>,
}

const OPENRLHF: &[&str] = &["openrlhf.cli."];

const PROGRAMS: [Program; 6] = [
    Program {
        origin: Origin::Openrlhf,
        packages: OPENRLHF,
        names: &["openrlhf.cli.train_ppo_ray"],
        keys: flags,
    },
    Program {
        origin: Origin::OpenrlhfSft,
        packages: OPENRLHF,
        names: &["openrlhf.cli.train_sft"],
        keys: flags,
    },
    Program {
        origin: Origin::OpenrlhfDpo,
        packages: OPENRLHF,
        names: &["openrlhf.cli.train_dpo"],
        keys: flags,
    },
    Program {
        origin: Origin::OpenrlhfRm,
        packages: OPENRLHF,
        names: &["openrlhf.cli.train_rm"],
        keys: flags,
    },
    Program {
        origin: Origin::OpenrlhfKto,
        packages: OPENRLHF,
        names: &["openrlhf.cli.train_kto"],
        keys: flags,
    },
    Program {
        origin: Origin::Verl,
        packages: &["verl.trainer.", "recipe.dapo."],
        names: &["verl.trainer.main_ppo", "recipe.dapo.main_dapo"],
        keys: overrides,
    },
];

impl Program {
    /// The first program that `text` calls, or whose system it names. OpenRLHF is always configured by a
    /// command, verl possibly by a YAML.
    pub(super) fn of(text: &str, origin: Option<Origin>) -> Option<&'static Self> {
        // verl's YAML names its classes.
        if text.lines().any(|line| line.starts_with("actor_rollout_ref:")) {
            return None;
        }
        let fits = |program: &&Self| origin.is_none_or(|origin| origin == program.origin);
        let is_called = |program: &&Self| {
            let calls = program.calls(text, &mut Variables::of_shell()).unwrap_or_default();
            calls.iter().any(|(name, _)| program.names.contains(&name.as_str()))
        };
        let is_meant =
            |program: &&Self| program.is_named_in(text) || (origin.is_some() && program.packages == OPENRLHF);
        let mut programs = PROGRAMS.iter().filter(fits);
        programs.clone().find(is_called).or_else(|| programs.find(is_meant))
    }

    fn is_named_in(&self, text: &str) -> bool {
        self.packages.iter().any(|package| text.contains(package))
    }

    /// Keys of the only command in `script` that calls the program.
    pub(super) fn keys(&self, script: &str) -> Result<Keys, String> {
        let mut calls = self.calls(script, &mut Variables::of_shell())?;
        let other = calls.first().map(|(name, _)| name.clone());
        calls.retain(|(name, _)| self.names.contains(&name.as_str()));
        let name = self.names[0];
        match (calls.len(), calls.pop(), other) {
            (1, Some((_, arguments)), _) => (self.keys)(arguments),
            (0, _, Some(other)) => {
                let of_system = PROGRAMS.iter().filter(|program| program.packages == self.packages);
                let names: Vec<&str> = of_system.flat_map(|program| program.names).copied().collect();
                match names.contains(&other.as_str()) {
                    true => Err(format!("it calls `{other}`, not `{name}`: leave out --from")),
                    false => {
                        let names = names.join("`, `");
                        Err(format!("it calls `{other}`, but only commands of `{names}` are imported"))
                    }
                }
            }
            (0, ..) => Err(format!("it has no command that calls `{name}`")),
            (count, ..) => Err(format!("it calls `{name}` {count} times: keep one of the commands")),
        }
    }

    /// Calls of the system's programs in a script, each with its arguments.
    fn calls(&self, script: &str, variables: &mut Variables) -> Result<Vec<(String, Vec<String>)>, String> {
        let mut found = Vec::new();
        for mut words in shell::commands(script, variables)? {
            // The shell would end the command before this line and train without these flags.
            if words[0].starts_with("--") {
                return Err(format!(
                    "a line starts with `{}`: end the line before it with a backslash",
                    words[0]
                ));
            }
            if let Some(place) = words.iter().position(|word| self.called_by(word).is_some()) {
                let arguments = words.split_off(place + 1);
                found.extend(self.called_by(&words[place]).map(|name| (name, arguments)));
                continue;
            }
            // A command may be an argument of another: `bash -c "python -m ..."`.
            for word in words.iter().filter(|word| self.is_named_in(word) && *word != script) {
                found.extend(self.calls(word, variables)?);
            }
        }
        Ok(found)
    }

    fn called_by(&self, word: &str) -> Option<String> {
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.');
        let named = |package: &&str| word.split_once(*package).filter(|(_, name)| is_name(name));
        self.packages.iter().find_map(|package| named(package).map(|(_, name)| format!("{package}{name}")))
    }
}

/// Converts `--a.b 1 2 --c` to `a.b: [1, 2], c: true`.
fn flags(arguments: Vec<String>) -> Result<Keys, String> {
    let mut found = Keys::new();
    let mut current: Option<String> = None;
    for word in arguments {
        if let Some(flag) = word.strip_prefix("--") {
            let (flag, value) =
                flag.split_once('=').map_or((flag, None), |(flag, value)| (flag, Some(value)));
            found.insert(
                flag.to_owned(),
                value.map_or(Value::Bool(true), |value| Value::String(value.to_owned())),
            );
            current = Some(flag.to_owned());
            continue;
        }
        let flag =
            current.as_ref().ok_or_else(|| format!("`{word}` does not follow a flag of the program"))?;
        let slot = &mut found[flag.as_str()];
        let word = Value::String(word);
        *slot = match slot.take() {
            Value::Array(items) => items.into_iter().chain([word]).collect(),
            Value::Bool(_) => word,
            first => Value::Array(vec![first, word]),
        };
    }
    Ok(found)
}

/// Converts Hydra's `a.b=1 +c=[d,e] --config-name=f` to `a: {b: 1}, c: [d, e], config-name: f`. The last of
/// several values counts.
fn overrides(arguments: Vec<String>) -> Result<Keys, String> {
    let mut found = Keys::new();
    let mut arguments = arguments.into_iter();
    while let Some(word) = arguments.next() {
        let (key, value) = match (word.split_once('='), word.starts_with("--")) {
            (Some((key, value)), _) => (key.to_owned(), value.to_owned()),
            (None, true) => (word, arguments.next().unwrap_or_default()),
            // An unexpanded variable, reported in its row.
            (None, false) => (word, String::new()),
        };
        let key = key.trim_start_matches(['+', '-']);
        match key.starts_with('$') {
            true => drop(found.insert(key.to_owned(), Value::Bool(true))),
            false => values::insert(&mut found, key, hydra(&value)),
        }
    }
    Ok(found)
}

/// Parses a value in Hydra's syntax, which is nearly YAML.
fn hydra(text: &str) -> Value {
    match serde_saphyr::from_str(text) {
        Ok(value) if shell::is_expanded(text) => value,
        _ => Value::String(text.to_owned()),
    }
}
