//! Comparison of our tables with the vendors' headers. `ci/abi` writes `abi/*.txt` from the headers of a release; a test of each
//! table asserts that it agrees.

use std::{any::type_name, fs, path::Path};

/// A parameter as `abi/probe.h` prints it: what decides the register, and the size.
pub(crate) fn class<T>() -> String {
    let name = type_name::<T>();
    let is_float = matches!(name, "f32" | "f64");
    let is_number = name.starts_with(['i', 'u']) && !name.contains("::") && !name.starts_with("unsafe");
    let is_pointer = name.starts_with(['*', '&']) || name.contains("fn(");
    let kind = match () {
        () if is_float => 'f',
        () if is_number || is_pointer => 'i',
        () => 's',
    };
    format!("{kind}{}", size_of::<T>())
}

/// The line of a function that returns an enum.
pub(crate) fn function(name: &str, classes: &[String]) -> String {
    let classes: String = classes.iter().map(|class| format!(" {class}")).collect();
    format!("fn {name} i4{classes}")
}

/// The line of a size, an offset or a value.
pub(crate) fn fact(kind: &str, name: &str, number: impl TryInto<i64>) -> String {
    let number = number.try_into().ok().expect("numbers of an ABI are small");
    format!("{kind} {name} {number}")
}

/// Asserts that the headers of a release say all of `facts`.
#[track_caller]
pub(crate) fn assert_says(release: &str, facts: &[String]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("abi").join(format!("{release}.txt"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let missing: Vec<&String> =
        facts.iter().filter(|fact| !text.lines().any(|line| line == **fact)).collect();
    assert!(!facts.is_empty() && missing.is_empty(), "{release} does not say {missing:#?}");
}

#[test]
#[should_panic(expected = "hip_7.2 does not say")]
fn a_table_that_is_not_the_headers_is_found() {
    assert_says("hip_7.2", &[function("hipInit", &[class::<u64>()])]);
}
