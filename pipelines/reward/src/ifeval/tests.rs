use serde_json::json;

use super::*;

const ENGLISH: &str = "The weather in the mountains was beautiful and we walked along the river all morning";

/// An instruction with its arguments, texts that follow it and texts that do not.
type Case = (&'static str, Value, &'static [&'static str], &'static [&'static str]);

fn cases() -> Vec<Case> {
    vec![
        (
            "keywords:existence",
            json!({"keywords": ["Sun", "moon"]}),
            &["the sun and the MOON"],
            &["the sun", "soon"],
        ),
        (
            "keywords:frequency",
            json!({"keyword": "ab", "frequency": 2, "relation": "at least"}),
            &["ab AB", "abab ab"],
            &["ab", "a b"],
        ),
        (
            "keywords:frequency",
            json!({"keyword": "ab", "frequency": 2, "relation": "less than"}),
            &["ab", "none"],
            &["ab ab"],
        ),
        (
            "keywords:forbidden_words",
            json!({"forbidden_words": ["cat", "c++"]}),
            &["concatenate"],
            &["a Cat.", "the cat"],
        ),
        (
            "keywords:letter_frequency",
            json!({"letter": "E", "let_frequency": 3, "let_relation": "at least"}),
            &["eEe", "we see the"],
            &["ee"],
        ),
        (
            "language:response_language",
            json!({"language": "de"}),
            &["Das Wetter in den Bergen war sehr schön und wir gingen den ganzen Morgen am Fluss entlang"],
            &[ENGLISH],
        ),
        (
            "language:response_language",
            json!({"language": "hi"}),
            &["यह एक बहुत ही सुंदर दिन है और हम नदी के किनारे चल रहे हैं"],
            &[ENGLISH],
        ),
        (
            "length_constraints:number_sentences",
            json!({"num_sentences": 3, "relation": "at least"}),
            &["One. Two! Three?", "Dr. Who came. He saw. He left", "\"Yes.\" She left. Then (he did.) Gone."],
            &["One. Two.", "Mr. J. Smith of the U.S. Army came. He left.", "It is 3.5 m, e.g. here. Yes."],
        ),
        (
            "length_constraints:number_sentences",
            json!({"num_sentences": 2, "relation": "less than"}),
            &["Only one"],
            &["One. Two."],
        ),
        (
            "length_constraints:number_paragraphs",
            json!({"num_paragraphs": 2}),
            &["a\n***\nb", "***\na\n***\nb\n***"],
            &["a\n\nb", "a *** *** b", "a *** b *** c"],
        ),
        (
            "length_constraints:number_words",
            json!({"num_words": 3.0, "relation": "at least"}),
            &["one two three", "it's two"],
            &["one two", "..."],
        ),
        (
            "length_constraints:nth_paragraph_first_word",
            json!({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}),
            &["First.\n\nThen, it", "First.\n\n\"then it"],
            &["First.\n\nThence", "Then\n\nFirst", "a\n\nthen\n\nc", "a"],
        ),
        (
            "detectable_content:number_placeholders",
            json!({"num_placeholders": 2}),
            &["[name] and [address]", "[a] [b] [c]"],
            &["[name]", "[a\nb] [c]"],
        ),
        (
            "detectable_content:postscript",
            json!({"postscript_marker": "P.S."}),
            &["Bye.\nP.S. Write", "bye p. s. more"],
            &["Bye.", "PS more"],
        ),
        (
            "detectable_content:postscript",
            json!({"postscript_marker": "P.P.S"}),
            &["P.P.S more", "p. p. s more"],
            &["P.S. more"],
        ),
        (
            "detectable_format:number_bullet_lists",
            json!({"num_bullets": 2}),
            &["* a\n* b", "- a\n  - b", "* a\n- b\ntext"],
            &["* a", "** a\n** b", "* a\n* b\n* c"],
        ),
        (
            "detectable_format:constrained_response",
            json!({}),
            &["My answer is yes.", "Well. My answer is maybe. Sure"],
            &["My answer is Yes.", "yes"],
        ),
        (
            "detectable_format:number_highlighted_sections",
            json!({"num_highlights": 2}),
            &["*a* and *b*", "*a* b *c d*"],
            &["*a*", "a * b", "* *\n*a*"],
        ),
        (
            "detectable_format:multiple_sections",
            json!({"section_spliter": "Section", "num_sections": 2}),
            &["Section 1\na\nSection 2\nb", "Section1 Section2"],
            &["Section 1", "Section A Section B"],
        ),
        (
            "detectable_format:json_format",
            json!({}),
            &["{\"a\": [1, 2]}", "```json\n{\"a\": 1}\n```", "[]"],
            &["{a: 1}", "here: {}"],
        ),
        ("detectable_format:title", json!({}), &["<<A Title>>\ntext"], &["<< >>", "<Title>", "<<a\nb>>"]),
        (
            "combination:two_responses",
            json!({}),
            &["one ****** two", "****** one ****** two"],
            &["one", "one ****** one", "a ****** b ****** c", "a ****** ****** b"],
        ),
        (
            "combination:repeat_prompt",
            json!({"prompt_to_repeat": "What is it?"}),
            &["What is it? A thing.", " what is it?"],
            &["A thing. What is it?"],
        ),
        (
            "startend:end_checker",
            json!({"end_phrase": "The End."}),
            &["so. The end.", "\"... The End.\""],
            &["The end. Or not"],
        ),
        (
            "change_case:capital_word_frequency",
            json!({"capital_frequency": 2, "capital_relation": "at least"}),
            &["GO TO it", "(NASA) and U.S. law"],
            &["Go TO it", "1 2 3"],
        ),
        (
            "change_case:english_capital",
            json!({}),
            &["THE WEATHER IN THE MOUNTAINS WAS BEAUTIFUL AND WE WALKED ALONG THE RIVER ALL MORNING"],
            &[
                ENGLISH,
                "DAS WETTER IN DEN BERGEN WAR SEHR SCHÖN UND WIR GINGEN DEN GANZEN MORGEN AM FLUSS ENTLANG",
            ],
        ),
        (
            "change_case:english_lowercase",
            json!({}),
            &["the weather in the mountains was beautiful and we walked along the river all morning"],
            &[
                ENGLISH,
                "das wetter in den bergen war sehr schön und wir gingen den ganzen morgen am fluss entlang",
            ],
        ),
        ("punctuation:no_comma", json!({}), &["one and two"], &["one, two"]),
        ("startend:quotation", json!({}), &["\"all of it\"", " \"x\" "], &["\"", "\"a\" b", "a"]),
    ]
}

fn record(id: &str, kwargs: &Value) -> Record {
    let answer = json!({"instruction_id_list": [id], "kwargs": [kwargs]}).to_string();
    Record { id: "1".into(), answer, ..Record::default() }
}

fn score(record: &Record, text: &str, credit: Credit) -> Result<f64, Error> {
    Ifeval::new(IfevalConfig { credit, like_published: false })
        .score(record, &Completion { text, tokens: None, finished: true })
}

#[test]
fn each_kind_tells_who_follows() {
    let cases = cases();
    let mut kinds: Vec<&str> = cases.iter().map(|(id, ..)| *id).collect();
    kinds.dedup();
    assert_eq!(kinds.len(), 25);
    for (id, kwargs, follow, others) in &cases {
        let record = record(id, kwargs);
        Ifeval::new(IfevalConfig::default()).check(&record).unwrap();
        for text in *follow {
            assert_eq!(score(&record, text, Credit::All).unwrap(), 1.0, "{id} {kwargs}: {text:?}");
        }
        for text in others.iter().chain(&["", " \n"]) {
            assert_eq!(score(&record, text, Credit::All).unwrap(), 0.0, "{id} {kwargs}: {text:?}");
        }
    }
}

/// Texts that the published checker judges wrongly, with the right verdict; the published one is the other.
#[test]
fn the_published_checkers_errors_are_kept_on_demand() {
    let first = |nth: usize| json!({"num_paragraphs": 2, "nth_paragraph": nth, "first_word": "weather"});
    for (id, kwargs, text, right) in [
        ("keywords:forbidden_words", json!({"forbidden_words": ["天气"]}), "今天天气很好", false),
        ("keywords:forbidden_words", json!({"forbidden_words": [".NET"]}), "We use .NET.", false),
        ("keywords:forbidden_words", json!({"forbidden_words": ["node.js"]}), "a nodexjs b", true),
        ("keywords:forbidden_words", json!({"forbidden_words": ["C++"]}), "the letter C", true),
        ("keywords:existence", json!({"keywords": ["C++"]}), "the letter C", false),
        (
            "keywords:frequency",
            json!({"keyword": "C++", "frequency": 2, "relation": "less than"}),
            "Cc C C++",
            true,
        ),
        (
            "length_constraints:nth_paragraph_first_word",
            first(1),
            "\n\n\nWeather is fine today.\n\nWe go out.",
            true,
        ),
        ("length_constraints:nth_paragraph_first_word", first(2), "It is.\n\n\n\nWeather is fine.", true),
        ("length_constraints:nth_paragraph_first_word", first(2), "It is.\n \nWeather is fine.", true),
        ("length_constraints:nth_paragraph_first_word", first(2), "It is.\r\n\r\nWeather is fine.", true),
        ("punctuation:no_comma", json!({}), "今天，天气很好", false),
    ] {
        let record = record(id, &kwargs);
        for (like_published, expected) in [(false, right), (true, !right)] {
            let reward = Ifeval::new(IfevalConfig { credit: Credit::All, like_published });
            let score = reward.score(&record, &Completion { text, tokens: None, finished: true }).unwrap();
            assert_eq!(score, f64::from(u8::from(expected)), "{id} {kwargs} {text:?} {like_published}");
        }
    }
}

#[test]
fn several_are_all_or_a_share() {
    let columns = json!({
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{"num_words": null}, null],
    });
    let Value::Object(columns) = columns else { unreachable!() };
    let record = Record { id: "1".into(), columns, ..Record::default() };
    for (text, all, share) in
        [("\"a\"", 1.0, 1.0), ("a", 0.0, 0.5), ("a, b", 0.0, 0.0), ("</think>\"a\"", 1.0, 1.0)]
    {
        assert_eq!(score(&record, text, Credit::All).unwrap(), all, "{text}");
        assert_eq!(score(&record, text, Credit::Share).unwrap(), share, "{text}");
    }
}

#[test]
fn what_cannot_be_checked_is_an_error() {
    let fails = |id: &str, kwargs: Value, words: &str| {
        let told = anyroll_config::error_chain::one_line(
            &score(&record(id, &kwargs), "text", Credit::All).unwrap_err(),
        );
        assert!(told.contains(id) && told.contains(words), "{told}");
        let reward = Ifeval::new(IfevalConfig::default());
        assert!(reward.check(&record(id, &kwargs)).is_err(), "{id}");
    };
    fails("keywords:exist", json!({}), "unknown instruction");
    fails("keywords:existence", json!({}), "`keywords`");
    fails("keywords:forbidden_words", json!({"forbidden_words": ["a", " "]}), "has an empty text");
    fails(
        "length_constraints:number_words",
        json!({"num_words": 2.5, "relation": "at least"}),
        "`num_words`",
    );
    fails("length_constraints:number_words", json!({"num_words": 2, "relation": "about"}), "`about`");
    fails("language:response_language", json!({"language": "sw"}), "`sw` cannot be detected");
    let none = Record { id: "1".into(), answer: "7".into(), ..Record::default() };
    assert!(score(&none, "a", Credit::All).is_err());
}
