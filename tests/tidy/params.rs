//! The rule of parameters: a function has few, and a tuple's parts count each.

use syn::{Attribute, FnArg, ImplItem, Item, Signature, TraitItem, Type};

use super::source::Source;

/// Most parameters in addition to `self`.
const MOST: usize = 7;

/// Folder of the functions that launch kernels, which have the kernels' parameters.
const LAUNCHES: &str = "backends/src/kernels/";

pub fn check(source: &Source, add: &mut dyn FnMut(usize, String)) {
    let is_of_tests = source.path.ends_with("/tests.rs") || source.path.contains("/tests/");
    if !source.path.contains("/src/") || is_of_tests || source.path.starts_with(LAUNCHES) {
        return;
    }
    let Ok(file) = syn::parse_file(&source.text) else { return };
    for signature in signatures(&file.items) {
        let count = params(signature);
        if count > MOST {
            let name = signature.ident.to_string();
            add(line_of(&source.code, &name), format!("`{name}` has {count} parameters, at most {MOST}"));
        }
    }
}

/// Signatures of functions with a body outside of tests, and of those of traits.
fn signatures(items: &[Item]) -> Vec<&Signature> {
    let mut found = Vec::new();
    for item in items {
        match item {
            Item::Fn(item) if !is_test(&item.attrs) => found.push(&item.sig),
            Item::Impl(item) => found.extend(item.items.iter().filter_map(|it| match it {
                ImplItem::Fn(it) => Some(&it.sig),
                _ => None,
            })),
            Item::Trait(item) => found.extend(item.items.iter().filter_map(|it| match it {
                TraitItem::Fn(it) => Some(&it.sig),
                _ => None,
            })),
            Item::Mod(item) if !is_test(&item.attrs) => {
                found.extend(item.content.iter().flat_map(|(_, items)| signatures(items)));
            }
            _ => {}
        }
    }
    found
}

fn is_test(attrs: &[Attribute]) -> bool {
    attrs.iter().any(|attr| {
        attr.path().is_ident("test")
            || attr.path().is_ident("cfg")
                && attr.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    })
}

fn params(signature: &Signature) -> usize {
    let parts = signature.inputs.iter().map(|input| match input {
        FnArg::Receiver(_) => 0,
        FnArg::Typed(input) => parts(&input.ty),
    });
    parts.sum()
}

fn parts(of: &Type) -> usize {
    match of {
        Type::Tuple(tuple) if !tuple.elems.is_empty() => tuple.elems.iter().map(parts).sum(),
        Type::Reference(of) => parts(&of.elem),
        _ => 1,
    }
}

/// The first line with a function of this name.
fn line_of(code: &str, name: &str) -> usize {
    let starts = |line: &str| {
        let tail = line.split_once(&format!("fn {name}")).map(|(_, tail)| tail);
        tail.is_some_and(|tail| tail.starts_with(['(', '<']))
    };
    code.lines().position(starts).map_or(1, |index| index + 1)
}

#[cfg(test)]
mod tests {
    use super::super::expect;

    fn check(text: &str, rules: &[(usize, &str)]) {
        expect("models/src/a.rs", text, rules);
    }

    #[test]
    fn functions_have_few_parameters() {
        let eight = "a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8, h: u8";
        let rule = [(2, "`f` has 8 parameters")];
        check(&format!("\nfn f({eight}) {{}}\n"), &rule);
        check(&format!("\nfn f<T>({eight}) -> T {{}}\n"), &rule);
        check(&format!("impl A {{\npub fn f(&self, {eight}) {{}}\n}}\n"), &rule);
        check(&format!("trait A {{\nfn f(&self, {eight});\n}}\n"), &rule);
        check(&format!("mod a {{\nfn f({eight}) {{}}\n}}\n"), &rule);
        check("\nfn f((a, b): (u8, (u8, u8)), c: &(u8, u8, u8), d: u8, e: u8) {}\n", &rule);
    }

    #[test]
    fn few_parameters_are_free() {
        check("fn f(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8) {}\n", &[]);
        let kinds = "(a, b): (u8, u8), c: [u8; 9], d: fn(u8, u8), e: (), g: Vec<(u8, u8)>";
        check(&format!("impl A {{\n    fn f(&self, {kinds}, h: u8) {{}}\n}}\n"), &[]);
    }

    #[test]
    fn tests_and_launches_are_free() {
        let f = "fn f(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8, h: u8)";
        check(&format!("#[cfg(test)]\nmod tests {{\n    {f} {{}}\n}}\n"), &[]);
        expect("backends/src/a.rs", &format!("unsafe extern \"C\" {{\n    {f};\n}}\n"), &[]);
        expect("backends/src/kernels/a.rs", &format!("{f} {{}}\n"), &[]);
        expect("models/src/a/tests.rs", &format!("{f} {{}}\n"), &[]);
        expect("models/tests/a.rs", &format!("{f} {{}}\n"), &[]);
    }
}
