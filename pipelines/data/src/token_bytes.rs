//! Bytes of text that each token stands for.

use serde_json::Value;

/// Content of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenBytes {
    /// Bytes of text, which may be part of a character.
    Text(Vec<u8>),
    /// No text: a special token, by name.
    Special(String),
}

/// Encoding of text pieces in a vocabulary, determined by the decoder of a `tokenizer.json`.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    /// Each byte is written as a character, as in GPT-2.
    is_byte_level: bool,
    /// Bytes of characters without a piece are written as `<0x0A>`.
    has_bytes: bool,
    /// Replacement of a space.
    space: Option<String>,
}

impl Pieces {
    /// Reads the decoder from JSON.
    ///
    /// # Errors
    /// The type of an unsupported decoder.
    pub fn of(decoder: &Value) -> Result<Pieces, String> {
        let mut pieces = Pieces::default();
        pieces.read(decoder)?;
        Ok(pieces)
    }

    fn read(&mut self, decoder: &Value) -> Result<(), String> {
        match decoder["type"].as_str() {
            Some("Sequence") => {
                let parts = decoder["decoders"].as_array().map_or(&[][..], Vec::as_slice);
                return parts.iter().try_for_each(|part| self.read(part));
            }
            Some("ByteLevel") => self.is_byte_level = true,
            Some("ByteFallback") => self.has_bytes = true,
            Some("Metaspace") => self.space = decoder["replacement"].as_str().map(str::to_owned),
            Some("Replace") if decoder["content"] == " " => {
                self.space = decoder["pattern"]["String"].as_str().map(str::to_owned);
            }
            // Stripping a leading space does not change the bytes of tokens.
            Some("Fuse" | "Strip") => {}
            other => return Err(format!("its decoder is {}", other.unwrap_or("none"))),
        }
        Ok(())
    }

    /// The bytes of a piece; `None` if it is not valid.
    pub fn bytes(&self, piece: &str) -> Option<Vec<u8>> {
        if self.is_byte_level {
            return piece.chars().map(byte_of).collect();
        }
        let digits = piece.strip_prefix("<0x").and_then(|piece| piece.strip_suffix('>'));
        if let Some(digits) = digits.filter(|digits| self.has_bytes && digits.len() == 2) {
            return u8::from_str_radix(digits, 16).ok().map(|byte| vec![byte]);
        }
        Some(match &self.space {
            Some(space) => piece.replace(space, " ").into_bytes(),
            None => piece.as_bytes().to_vec(),
        })
    }
}

/// The byte that GPT-2 writes as this character. Printable characters of Latin-1 stand for themselves, the
/// other bytes follow in order from U+0100.
fn byte_of(character: char) -> Option<u8> {
    let is_itself = |code: u32| matches!(code, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(character);
    match code {
        0x100.. => (0..=255u8).filter(|&byte| !is_itself(byte.into())).nth((code - 0x100) as usize),
        _ if is_itself(code) => u8::try_from(code).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use anyroll_models::hf::ModelFolder;
    use serde_json::json;

    use super::*;
    use crate::{CharTokenizer, Tokenizer};
    use anyroll_config::FolderConfig;

    #[test]
    fn pieces_are_read_as_their_decoder_writes_them() {
        let gpt = Pieces::of(&json!({"type": "ByteLevel"})).unwrap();
        assert_eq!(gpt.bytes("Ġa\u{0100}Ċ").unwrap(), b" a\0\n");
        assert_eq!(gpt.bytes("Ã©").unwrap(), "é".as_bytes());
        assert_eq!(gpt.bytes("€"), None);
        // Every byte has a character, and no two the same.
        let all: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        assert!(all.len() == 256 && (0..=255).all(|byte| all.contains(&byte)));
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ]});
        let llama = Pieces::of(&llama).unwrap();
        assert_eq!(llama.bytes("▁a▁é").unwrap(), " a é".as_bytes());
        assert_eq!((llama.bytes("<0x0A>").unwrap(), llama.bytes("<0xzz>")), (vec![10], None));
        let words = Pieces::of(&json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}));
        assert_eq!(words.unwrap().bytes("_<0x0A>").unwrap(), b" <0x0A>");
        assert!(Pieces::of(&json!({"type": "WordPiece"})).unwrap_err().contains("WordPiece"));
        assert!(Pieces::of(&Value::Null).is_err());
    }

    /// The bytes of a text's tokens are the text's.
    #[test]
    fn tokens_have_the_bytes_of_their_text() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny_model");
        let config = FolderConfig { path: path.clone(), chat: false, system_prompt: None, lora: None };
        let folder = Tokenizer::of_folder(&ModelFolder::open(&path).unwrap(), &config).unwrap();
        let characters = Tokenizer::Characters(CharTokenizer::new(&"a é€😀\n\"{}".chars().collect()));
        for tokenizer in [folder, characters] {
            let all = tokenizer.token_bytes().unwrap();
            for text in ["a é€ 😀\n", "{\"a\": \"\u{e9}\"}"] {
                let Ok(tokens) = tokenizer.encode_text(text) else { continue };
                let bytes = tokens.iter().map(|&token| match &all[token as usize] {
                    TokenBytes::Text(bytes) => bytes.clone(),
                    TokenBytes::Special(name) => panic!("{name} in {text}"),
                });
                assert_eq!(bytes.collect::<Vec<_>>().concat(), text.as_bytes());
            }
            for stop in tokenizer.stop_tokens() {
                assert!(matches!(all[stop as usize], TokenBytes::Special(_)), "{stop}");
            }
        }
    }
}
