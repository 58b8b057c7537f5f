//! WGSL to SPIR-V, in which no operation is contracted into another.

use naga::{
    back::spv,
    front::wgsl,
    valid::{Capabilities, ValidationFlags, Validator},
};

/// Compiles all entry points of `source`.
pub(super) fn compile(source: &str) -> Result<Vec<u32>, String> {
    let module = wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let capabilities = Capabilities::IMMEDIATES | Capabilities::FLOAT64;
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .validate(&module)
        .map_err(|error| error.emit_to_string(source))?;
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        // Every kernel writes its memory before it reads it, and ends.
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        ..spv::Options::default()
    };
    let words = spv::write_vec(&module, &info, &options, None).map_err(|error| error.to_string())?;
    Ok(without_contraction(&words))
}

// Numbers of the SPIR-V specification.
const HEADER_WORDS: usize = 5;
const OP_DECORATE: u32 = 71;
const NO_CONTRACTION: u32 = 42;
/// OpFAdd, OpFSub, OpFMul and OpFDiv, whose result is their third word.
const ARITHMETIC: [u32; 4] = [129, 131, 133, 136];
/// OpTypeVoid to OpTypeForwardPointer: the first of them ends the decorations.
const TYPES: std::ops::RangeInclusive<u32> = 19..=39;

/// Decorates each addition, subtraction, product and quotient as one that is rounded by itself: WGSL has no word for it.
fn without_contraction(words: &[u32]) -> Vec<u32> {
    let mut decorations = Vec::new();
    let mut end_of_decorations = None;
    let mut at = HEADER_WORDS;
    while at < words.len() {
        let (len, code) = ((words[at] >> 16) as usize, words[at] & 0xffff);
        if TYPES.contains(&code) {
            end_of_decorations.get_or_insert(at);
        }
        if ARITHMETIC.contains(&code) {
            decorations.extend([3 << 16 | OP_DECORATE, words[at + 2], NO_CONTRACTION]);
        }
        at += len.max(1);
    }
    let (before, after) = words.split_at(end_of_decorations.unwrap_or(words.len()));
    [before, &decorations, after].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code and the words of each instruction.
    fn instructions(mut words: &[u32]) -> Vec<(u32, &[u32])> {
        let mut found = Vec::new();
        words = &words[HEADER_WORDS..];
        while let Some(first) = words.first() {
            let (one, rest) = words.split_at((first >> 16) as usize);
            found.push((first & 0xffff, one));
            words = rest;
        }
        found
    }

    #[test]
    fn each_float_operation_is_rounded_by_itself() {
        let source = "@group(0) @binding(0) var<storage, read_write> x: array<f32>;
            @compute @workgroup_size(1) fn main() { x[0] = x[1] * x[2] + x[3] / x[4] - x[5]; }";
        let words = compile(source).unwrap();
        let all = instructions(&words);
        let results = |code| all.iter().filter(move |it| it.0 == code).map(|it| it.1[2]);
        let decorated = |id| all.iter().any(|it| it.1 == [3 << 16 | OP_DECORATE, id, NO_CONTRACTION]);
        for code in ARITHMETIC {
            assert_eq!(results(code).count(), 1, "operations of code {code}");
            assert!(results(code).all(decorated), "code {code}");
        }
        let last_decoration = all.iter().rposition(|it| it.0 == OP_DECORATE);
        assert!(last_decoration < all.iter().position(|it| TYPES.contains(&it.0)));
    }

    #[test]
    fn an_error_names_its_line() {
        let error = compile("@compute @workgroup_size(1)\nfn main() { let x: f32 = 1u; }").unwrap_err();
        assert!(error.contains(":2:"), "{error}");
    }
}
