//! Rules for Rust: use of `unsafe`, vendors' names and the environment.

use super::source::{Source, words};

/// Names that may not start a word. Vendors' names appear only in `backends`.
const VENDORS: [&str; 7] = ["cuda", "rocm", "nccl", "rccl", "hccl", "nvidia", "vulkan"];
/// Names that are also parts of plain words, so only whole words count.
const SHORT_VENDORS: [&str; 3] = ["hip", "npu", "ascend"];

const READS_ENVIRONMENT: [&str; 6] = ["var", "var_os", "vars", "vars_os", "args", "args_os"];

pub fn check(source: &Source, add: &mut dyn FnMut(usize, String)) {
    check_unsafe(source, add);
    check_vendors(source, add);
    check_environment(source, add);
    check_unfinished(source, add);
}

fn check_unsafe(source: &Source, add: &mut dyn FnMut(usize, String)) {
    if source.krate() != "backends" {
        if is_crate_root(&source.path) && !source.code.contains("#![forbid(unsafe_code)]") {
            add(1, "only backends may be unsafe: a crate root starts with #![forbid(unsafe_code)]".into());
        }
        for (line, code) in numbered(&source.code) {
            if words(code).any(|it| it == "unsafe") {
                add(line, "only backends may be unsafe".into());
            }
        }
        return;
    }
    let text: Vec<&str> = source.text.lines().collect();
    let code: Vec<&str> = source.code.lines().collect();
    for (index, line) in code.iter().enumerate() {
        for (at, _) in line.match_indices("unsafe") {
            // The rest of the item, which rustfmt may have put on the next line.
            let after = [&line[at..], code.get(index + 1).unwrap_or(&"")].join(" ");
            let Some(marks) = marks_wanted(&after) else { continue };
            let in_trait_impl = marks.contains(&"# Safety") && is_in_trait_impl(&code, index);
            if !in_trait_impl && !is_explained(&text, &code, index, marks) {
                add(index + 1, format!("unsafe without a comment that has `{}`", marks.join("` or `")));
            }
        }
    }
}

/// Returns the marks that the comment above must contain, based on the text after the word `unsafe`.
fn marks_wanted(after: &str) -> Option<&'static [&'static str]> {
    let mut tokens = after.strip_prefix("unsafe")?.split_whitespace().peekable();
    let first = tokens.next()?;
    if first == "extern" {
        // `unsafe extern "C" fn name`, whose literal is blank. A foreign block is only a declaration.
        return (tokens.next() == Some("fn") && tokens.next().is_some()).then_some(&["# Safety", "SAFETY:"]);
    }
    match first {
        "impl" => Some(&["SAFETY:"]),
        // A macro's `$name` is documented where the macro is used.
        "fn" if tokens.next().is_some_and(|it| it.starts_with('$')) => None,
        // `unsafe fn(` is a type.
        "fn" => Some(&["# Safety", "SAFETY:"]),
        "trait" => Some(&["# Safety"]),
        _ if first.starts_with('{') => Some(&["SAFETY:"]),
        _ => None,
    }
}

/// Returns true if a comment above the statement or item has one of the marks.
fn is_explained(text: &[&str], code: &[&str], index: usize, marks: &[&str]) -> bool {
    let has_mark = |line: &str| marks.iter().any(|it| line.contains(it));
    if has_mark(text[index]) {
        return true;
    }
    for above in (0..index).rev() {
        let (text, code) = (text[above].trim(), code[above].trim());
        let is_comment = code.is_empty() && !text.is_empty();
        if is_comment && has_mark(text) {
            return true;
        }
        // A line that ends here belongs to the statement or item before.
        let ends_another = text.is_empty() || code.ends_with([';', '{', '}', ',']);
        if !is_comment && ends_another && !code.starts_with("#[") {
            return false;
        }
    }
    false
}

/// Returns true if the item is in `impl Trait for Type`: its safety contract is documented at the trait.
fn is_in_trait_impl(code: &[&str], index: usize) -> bool {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let own = indent(code[index]);
    let parent = code[..index].iter().rev().find(|it| !it.trim().is_empty() && indent(it) < own);
    parent.is_some_and(|it| words(it).any(|word| word == "impl") && words(it).any(|word| word == "for"))
}

fn check_vendors(source: &Source, add: &mut dyn FnMut(usize, String)) {
    // Configurations, messages and docs of the outer crates may name the user's choices; their code may not.
    let text = match source.krate() {
        "backends" => return,
        "models" | "strategy" => &source.text,
        _ => &source.code,
    };
    for (line, text) in numbered(text) {
        let parts = words(text).flat_map(parts_of_word);
        for part in parts {
            let named = VENDORS.iter().any(|it| part.starts_with(it)) || SHORT_VENDORS.contains(&&*part);
            if named {
                add(line, format!("a vendor's name outside backends: {part}"));
            }
        }
    }
}

/// `cuda_stream` and `CudaStream` are `cuda` and `stream`.
fn parts_of_word(word: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut last = '_';
    for it in word.chars() {
        if it == '_' || it.is_uppercase() && last.is_lowercase() {
            parts.push(String::new());
        }
        if it != '_' {
            parts.last_mut().unwrap().extend(it.to_lowercase());
        }
        last = it;
    }
    parts
}

/// Libraries receive values. Programs and the run behind them may read them, the build, tests and examples.
fn check_environment(source: &Source, add: &mut dyn FnMut(usize, String)) {
    let may_read = matches!(
        source.krate(),
        "pipelines"
            | "pipelines/import"
            | "pipelines/reward"
            | "programs"
            | "xtask"
            | "xtask/libtorch"
            | "tests"
    ) || source.path.ends_with("build.rs")
        || source.path.contains("/tests/")
        || source.path.contains("/examples/")
        || source.path.contains("/benches/");
    if may_read {
        return;
    }
    for (line, code) in numbered(&source.code) {
        let reads = |it: &&&str| code.contains(&format!("env::{it}("));
        if let Some(name) = READS_ENVIRONMENT.iter().find(reads) {
            add(line, format!("only pipelines and programs read the environment and arguments: env::{name}"));
        }
    }
}

fn check_unfinished(source: &Source, add: &mut dyn FnMut(usize, String)) {
    for (line, code) in numbered(&source.code) {
        for unfinished in ["todo!", "unimplemented!", "#[ignore"] {
            if code.contains(unfinished) {
                add(line, format!("unfinished: {unfinished}"));
            }
        }
    }
}

fn is_crate_root(path: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or(path);
    let in_folder = |name: &str| path.rsplit('/').nth(1) == Some(name);
    path.ends_with("src/lib.rs")
        || path.ends_with("src/main.rs")
        || file == "build.rs"
        || path == "tests/tests.rs"
        || path.starts_with("xtask/tests/")
        || in_folder("bin")
        || in_folder("examples")
        || in_folder("benches")
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

#[cfg(test)]
mod tests {
    use super::super::expect;

    #[test]
    fn unsafe_stays_in_backends() {
        expect("models/src/a.rs", "fn f() {\n    unsafe { g() }\n}\n", &[(2, "only backends may be unsafe")]);
        expect("models/src/a.rs", "// unsafe\nlet a = \"unsafe\"; // unsafe\n", &[]);
        expect("strategy/src/lib.rs", "//! Text.\n", &[(1, "forbid(unsafe_code)")]);
        expect("strategy/src/lib.rs", "#![forbid(unsafe_code)]\n", &[]);
        expect("pipelines/src/bin/x.rs", "// #![forbid(unsafe_code)]\n", &[(1, "forbid(unsafe_code)")]);
    }

    #[test]
    fn unsafe_is_explained() {
        let check = |text: &str, rules: &[(usize, &str)]| expect("backends/src/a.rs", text, rules);
        check("let a = unsafe { f() };\n", &[(1, "SAFETY:")]);
        check("// SAFETY: f is pure.\nlet a = unsafe { f() };\n", &[]);
        check("// SAFETY: a long\n// reason.\n#[rustfmt::skip]\nlet a =\n    unsafe { f() };\n", &[]);
        check("// SAFETY: another's.\nlet a = 1;\nlet b = unsafe { f() };\n", &[(3, "SAFETY:")]);
        check("// SAFETY: another's.\n\nlet b = unsafe { f() };\n", &[(3, "SAFETY:")]);
        check("let s = \"SAFETY:\";\nlet b = unsafe { f() };\n", &[(2, "SAFETY:")]);
        check("unsafe impl Send for A {}\n", &[(1, "SAFETY:")]);
        check("/// Frees.\npub unsafe fn free() {}\n", &[(2, "# Safety")]);
        check("/// Frees.\n///\n/// # Safety\n/// Once.\n#[inline]\npub unsafe fn free() {}\n", &[]);
        check("unsafe extern \"C\" fn call() {}\n", &[(1, "# Safety")]);
        check("struct T {\n    f: unsafe extern \"C\" fn(u32),\n    g: unsafe fn(u32),\n}\n", &[]);
        check("unsafe extern \"C\" {\n    fn f();\n}\n", &[]);
        check("impl Device for Cpu {\n    unsafe fn free() {}\n}\n", &[]);
        check("impl Cpu {\n    unsafe fn free() {}\n}\n", &[(2, "# Safety")]);
        check("macro_rules! m {\n    ($name:ident) => {\n        unsafe fn $name() {}\n    }\n}\n", &[]);
        check("/// Text.\npub unsafe trait Raw {}\n", &[(2, "# Safety")]);
    }

    #[test]
    fn vendors_stay_in_backends() {
        let named: &[(usize, &str)] = &[(1, "a vendor's name")];
        for line in
            ["fn on_cuda() {}", "// as NCCL does", "let a = \"rocm\";", "CudaGraph", "hipMalloc", "an npu"]
        {
            expect("models/src/a.rs", line, named);
            expect("backends/src/a.rs", line, &[]);
        }
        for line in ["input", "relationship", "in ascending order", "chip"] {
            expect("strategy/src/a.rs", line, &[]);
        }
        expect("pipelines/src/a.rs", "/// Like cuda.\nlet backend = \"cuda\";\n", &[]);
        expect("pipelines/src/a.rs", "match it { Backend::Cuda => 1 }", named);
    }

    #[test]
    fn the_environment_is_read_in_pipelines() {
        let line = "let a = std::env::var_os(\"A\");";
        expect("backends/src/a.rs", line, &[(1, "env::var_os")]);
        expect("tests/conformance/src/a.rs", "for a in env::args() {}", &[(1, "env::args")]);
        for path in ["pipelines/src/a.rs", "xtask/src/a.rs", "backends/build.rs", "backends/examples/a.rs"] {
            expect(path, line, &[]);
        }
        expect("models/src/a.rs", "let folder = env::temp_dir();", &[]);
    }

    #[test]
    fn nothing_is_unfinished() {
        expect("models/src/a.rs", "fn f() {\n    todo!()\n}\n", &[(2, "todo!")]);
        expect("models/src/a.rs", "#[ignore = \"slow\"]\n#[test]\nfn f() {}\n", &[(1, "#[ignore")]);
        expect("models/src/a.rs", "fn f() { unimplemented!(\"no\") }\n", &[(1, "unimplemented!")]);
        expect("models/src/a.rs", "// not todo!() but done\n", &[]);
    }
}
