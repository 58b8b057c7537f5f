//! Rules for manifests: allowed dependencies between crates, and a reason for each dependency.

use super::source::Source;

/// Each crate's folder, and the crates of ours that it may name: those above it in this list; `anyroll-libtorch` is for
/// build scripts and the launcher, and tests of `import` read what it writes.
const MAY_DEPEND: [(&str, &[&str]); 18] = [
    ("tests/close", &["anyroll-libtorch"]),
    ("backends", &["anyroll-close", "anyroll-libtorch"]),
    ("models", &["anyroll-backends", "anyroll-close", "anyroll-libtorch"]),
    ("sandbox", &[]),
    ("strategy", &["anyroll-backends", "anyroll-models", "anyroll-libtorch"]),
    ("pipelines/math", &[]),
    ("pipelines/algorithm", &["anyroll-libtorch"]),
    (
        "pipelines/config",
        &["anyroll-algorithm", "anyroll-backends", "anyroll-models", "anyroll-strategy", "anyroll-libtorch"],
    ),
    ("pipelines/data", &["anyroll-config", "anyroll-models", "anyroll-libtorch"]),
    (
        "pipelines/reward",
        &[
            "anyroll-config",
            "anyroll-data",
            "anyroll-math",
            "anyroll-models",
            "anyroll-sandbox",
            "anyroll-libtorch",
        ],
    ),
    (
        "pipelines",
        &[
            "anyroll-algorithm",
            "anyroll-backends",
            "anyroll-close",
            "anyroll-config",
            "anyroll-data",
            "anyroll-models",
            "anyroll-reward",
            "anyroll-strategy",
            "anyroll-libtorch",
        ],
    ),
    ("pipelines/import", &["anyroll-config", "anyroll-pipelines", "anyroll-libtorch"]),
    (
        "programs",
        &[
            "anyroll-backends",
            "anyroll-close",
            "anyroll-config",
            "anyroll-conformance",
            "anyroll-data",
            "anyroll-import",
            "anyroll-models",
            "anyroll-pipelines",
            "anyroll-reward",
            "anyroll-sandbox",
            "anyroll-strategy",
            "anyroll-libtorch",
        ],
    ),
    ("tests/conformance", &["anyroll-backends", "anyroll-libtorch"]),
    ("xtask", &["anyroll-libtorch"]),
    ("xtask/libtorch", &[]),
    ("xtask/matrix", &[]),
    ("xtask/same", &[]),
];

pub fn check(source: &Source, add: &mut dyn FnMut(usize, String)) {
    if source.path == "Cargo.toml" {
        check_reasons(&source.text, add);
    } else if let Some(folder) = source.path.strip_suffix("/Cargo.toml") {
        check_crate(folder, &source.text, add);
    }
}

fn check_reasons(manifest: &str, add: &mut dyn FnMut(usize, String)) {
    let mut above = "";
    for (line, section, text) in entries(manifest) {
        let ours = text.contains("path = \"");
        if section == "workspace.dependencies" && is_key(text) && !ours && !above.starts_with('#') {
            add(line, format!("a dependency has its reason in the line above: {}", key(text)));
        }
        above = text;
    }
}

fn check_crate(folder: &str, manifest: &str, add: &mut dyn FnMut(usize, String)) {
    let Some((_, allowed)) = MAY_DEPEND.iter().find(|it| it.0 == folder) else {
        add(1, format!("a crate has its line in tests/tidy/manifests.rs: {folder}"));
        return;
    };
    for (line, section, text) in entries(manifest) {
        if !section.ends_with("dependencies") || !is_key(text) {
            continue;
        }
        let name = key(text);
        if !text.contains("workspace = true") {
            add(line, format!("a version stands in the root manifest: {name}"));
        }
        if name.starts_with("anyroll-") && !allowed.contains(&name) {
            add(line, format!("{folder} may not depend on {name}"));
        }
    }
}

/// Returns each line with its number and its section.
fn entries(manifest: &str) -> impl Iterator<Item = (usize, &str, &str)> {
    let mut section = "";
    manifest.lines().enumerate().map(move |(index, text)| {
        if let Some(name) = text.strip_prefix('[') {
            section = name.trim_end().trim_end_matches(']');
        }
        (index + 1, section, text)
    })
}

fn is_key(text: &str) -> bool {
    text.starts_with(|it: char| it.is_alphanumeric())
}

fn key(text: &str) -> &str {
    text.split([' ', '.', '=']).next().unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::super::expect;

    #[test]
    fn dependencies_point_inwards() {
        let check = |path: &str, name: &str, rules: &[(usize, &str)]| {
            expect(
                path,
                &format!("[package]\nname = \"a\"\n[dev-dependencies]\n{name}.workspace = true\n"),
                rules,
            );
        };
        check("strategy/Cargo.toml", "anyroll-models", &[]);
        check("models/Cargo.toml", "anyroll-strategy", &[(4, "models may not depend on anyroll-strategy")]);
        check("tests/conformance/Cargo.toml", "anyroll-models", &[(4, "may not depend")]);
        check("backends/Cargo.toml", "anyroll-conformance", &[(4, "may not depend")]);
        check("xtask/Cargo.toml", "anyroll-backends", &[(4, "may not depend")]);
        check("extras/Cargo.toml", "thiserror", &[(1, "has its line in tests/tidy/manifests.rs")]);
    }

    #[test]
    fn versions_stand_in_the_root() {
        expect("models/Cargo.toml", "[dependencies]\nserde = \"1\"\n", &[(2, "root manifest: serde")]);
        let features = "[dependencies]\nserde = { workspace = true, features = [\"rc\"] }\n";
        expect("models/Cargo.toml", features, &[]);
        expect("models/Cargo.toml", "[features]\nserde = []\n", &[]);
    }

    #[test]
    fn dependencies_have_reasons() {
        let check = |text: &str, rules: &[(usize, &str)]| {
            expect("Cargo.toml", &format!("[workspace.dependencies]\n{text}"), rules);
        };
        check("# Errors.\nthiserror = \"2\"\n", &[]);
        check("# Errors.\nthiserror = \"2\"\nserde = \"1\"\n", &[(4, "the line above: serde")]);
        check("\nserde = \"1\"\n", &[(3, "the line above: serde")]);
        check("anyroll-models = { path = \"models\" }\n", &[]);
    }
}
