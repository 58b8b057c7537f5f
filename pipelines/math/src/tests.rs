use std::sync::LazyLock;
use std::time::{Duration, Instant};

use proptest::test_runner::{Config, TestRunner};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::*;

/// Tolerance of the reward's default.
const OPTIONS: Options = Options { tolerance: 1e-4, asks_percent: false, decimal_comma: false };

fn is_right(gold: &str, text: &str, finished: bool) -> bool {
    let gold = gold_answer(gold);
    !gold.is_empty() && answer(text, !finished).is_some_and(|predicted| is_equal(&gold, &predicted, OPTIONS))
}

fn score(gold: &str, text: &str, finished: bool) -> f64 {
    f64::from(u8::from(is_right(gold, text, finished)))
}

/// Kind, gold answer and predicted answer of each case.
fn cases() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    fields(include_str!("cases.tsv"))
}

fn fields(table: &'static str) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let lines = table.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| {
        let mut fields = line.split('\t');
        let mut field = || fields.next().unwrap_or_else(|| panic!("three fields: {line}"));
        (field(), field(), field())
    })
}

#[test]
fn every_case_of_the_table() {
    let mut failures = Vec::new();
    let (mut right, mut wrong) = (0, 0);
    for (kind, gold, predicted) in cases() {
        let expected = kind == "right";
        if expected {
            right += 1
        } else {
            wrong += 1
        }
        let boxed = format!(r"So it is \boxed{{{predicted}}}.");
        if score(gold, &boxed, true) != f64::from(u8::from(expected)) {
            failures.push(format!("{kind}: {gold}  |  {predicted}"));
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    assert!(right >= 180 && wrong >= 120 && right + wrong >= 300, "{right} right, {wrong} wrong");
}

/// Whole completions: context of answers, and completions without one.
#[test]
fn every_completion_of_the_table() {
    let mut failures = Vec::new();
    for (kind, gold, completion) in fields(include_str!("completions.tsv")) {
        let found = score(gold, &completion.replace('⏎', "\n"), true);
        if found != f64::from(u8::from(kind == "right")) {
            failures.push(format!("{kind}: {gold}  |  {completion}"));
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_gold_answer_equals_itself() {
    for (_, gold, _) in cases() {
        let undefined = gold.contains(r"\frac{1}{0}");
        assert!(undefined || score(gold, &format!(r"\boxed{{{gold}}}"), true) == 1.0, "{gold}");
    }
}

#[test]
fn finds_the_answer() {
    let check = |text: &str, expected: Option<&str>| {
        assert_eq!(extract::extract(text, false).as_deref(), expected, "{text}");
    };
    check(r"\boxed{5}", Some("5"));
    check(r"\boxed{1}, or rather \boxed{\frac{1}{2}}.", Some(r"\frac{1}{2}"));
    check(r"\fbox{7}", Some("7"));
    check(r"\boxed {7}", Some("7"));
    check(r"\boxed{\boxed{7}}", Some("7"));
    check(r"\boxed{3} and then \boxed{4", None);
    check(r"\boxed{\{1,2\}}", Some(r"\{1,2\}"));
    check(r"{ \boxed{3} } }", Some("3"));
    check("<think>\\boxed{1}</think> it is \\boxed{2}", Some("2"));
    check("<think>\\boxed{1}</think> it is 2", Some("2"));
    check("3 + 4\n#### 7", Some("7"));
    check("The final answer is $\\frac{1}{2}$.", Some(r"\frac{1}{2}"));
    check("The answer is 12. I hope it is right.", Some("12"));
    check("**Answer:** 12", Some("12"));
    check("The answer is $30.", Some("$30"));
    check("answer: 1\nanswer: 2", Some("2"));
    check(r"We have $x=1$, so \(y=2\).", Some("y=2"));
    check(r"Thus \[ z = 3 \]", Some("z = 3"));
    check("It is 3, then 4,500.25 in all.", Some("4,500.25"));
    check("x-5", None);
    check("it is -5", Some("-5"));
    check("3/4 of it", Some("3/4"));
    check("12% of it", Some("12%"));
    check("The answer is **18**", Some("18"));
    check("The answer is **18**.", Some("18"));
    check("**Answer: 18**", Some("18"));
    check("The answer is **18** dollars.", Some("18"));
    check("The answer is **3** million.", Some("3 million"));
    check("The answer is $3$ million.", Some("3 million"));
    check("The answer is 2**10", Some("2**10"));
    check("The answer is 42, as shown in step 3.", Some("42"));
    check("The answer is 42, since $x=2$.", Some("42"));
    check("The answer is $5$, and we are done.", Some("5"));
    check("The answer is therefore $5$ cm.", Some("5"));
    check("The answer is x=1, y=2", Some("x=1, y=2"));
    check(r"<answer>\frac{1}{2}</answer>", Some(r"\frac{1}{2}"));
    check("<answer>1</answer> No: <answer>The answer is 2.</answer> 3", Some("2"));
    check("<answer>1</answer> <answer>The answer is 2.</answer> 3", None);
    check("<answer>so we have 2</answer>", Some("2"));
    check("nothing here", None);
    check("", None);
}

#[test]
fn a_heading_is_no_answer() {
    let check = |text: &str, expected: Option<&str>| {
        assert_eq!(extract::extract(text, false).as_deref(), expected, "{text}");
    };
    check("#### Step 1: add\n40+2=42\n\nThe final answer is 42.", Some("42"));
    check("#### 2. Add the two\nThe answer is 42.", Some("42"));
    check("#### 2 cases\nThe answer is 42.", Some("42"));
    check("#### Conclusion\nThe total is 42.", Some("42"));
    check("#### The answer is 42", Some("42"));
    check("#### 42\n\nI hope that the answer is helpful.", Some("42"));
    check("#### $18\nThat is 3 times 6.", Some("$18"));
    check("####\n42", Some("42"));
    check("#### no solution\n", Some("no solution"));
    check("#### 3 million", Some("3 million"));
}

#[test]
fn the_last_number_is_taken_whole_or_not_at_all() {
    let check = |text: &str, expected: Option<&str>| {
        assert_eq!(extract::extract(text, false).as_deref(), expected, "{text}");
        assert_eq!(score("42", text, true), f64::from(u8::from(expected == Some("42"))), "{text}");
    };
    check("It is −42", Some("−42"));
    check("She owes -$42", Some("-$42"));
    check("She owes −€42.", Some("−€42"));
    check("It is − 42", None);
    check("It is - 42", None);
    check("Total:\n- 42", Some("42"));
    check("They made $42$ million.", Some("42 million"));
    check("They made **42** million.", Some("42 million"));
    check(r"x=\sqrt{42}", Some(r"\sqrt{42}"));
    check("x=√42", None);
    check("x=sqrt(42)", None);
    check("It is 2^42", None);
    check("It is 2^{42}", None);
    check("It is 2**42", None);
    check("It is 10^-42", None);
    check("It is 3.5e42", Some("3.5e42"));
    check("It is x_42", None);
    check("It is x/42", None);
    check("It is 42x", None);
    check("It is 42^x", None);
    check(r"It is 42\pi", Some(r"42\pi"));
    check("The ratio is 3:42", None);
    check("It is 3 1/42", Some("3 1/42"));
    check("They made 42 million dollars", Some("42 million"));
    check("It is 42 squared", Some("42 squared"));
    check("It is 42", Some("42"));
    check("It is **42**.", Some("42"));
    check("It is 40+2 = 42.", Some("42"));
    check("It is x-42", None);
    assert_eq!(score("-42", "It is −42", true), 1.0);
    assert_eq!(score("-42", "She owes -$42.", true), 1.0);
    assert_eq!(score("42", "It is US$42.", true), 1.0);
    assert_eq!(score("42000000", "They made 42 million dollars", true), 1.0);
}

/// A value named among others, or only compared with, is not chosen.
#[test]
fn a_hedge_is_no_answer() {
    for text in [
        "The answer is $5$ or $6$.",
        "The answer is $5$, $6$.",
        r"The answer is \(5\) and \(6\).",
        "The answer is $5$ (or $6$)",
        "The answer is $5$ or maybe 6",
        "The answer is $5$ times $6$",
        "The answer is **5** or **6**",
        "The answer is **5**-**6**",
        "The answer is either $5$ or $6$",
        "The answer is not $5$",
        "The answer is at least $5$.",
        "The answer is less than $5$",
        "<answer>not 5</answer>",
        "it is $4$ or $5$",
        "It is not 5.",
        "It isn't **5**",
        "x is greater than 5",
        "between 4 and 5",
        "3, 4, or 5",
    ] {
        assert_eq!(score("5", text, true), 0.0, "{text}");
    }
}

/// A number that the surrounding text changes or negates is not the answer.
#[test]
fn what_stands_around_an_answer_counts() {
    let mut failures = Vec::new();
    let mut check = |text: &'static str, expected: f64| {
        if score("5", text, true) != expected {
            failures.push(text)
        }
    };
    for text in [
        "$5$%",
        "The answer is $5$%.",
        "**5**%",
        "5 percent",
        "5 %",
        "#### 5%",
        r"\boxed{5}\%",
        r"\boxed{5} percent",
        "There are no 5",
        "It is never 5",
        "It can't be 5.",
        "I do not think that the answer is 5",
        r"not \boxed{5}",
        r"The answer is not \boxed{5}",
        r"\boxed{5} is wrong",
        "5 is wrong",
        "everything except 5",
        r"\boxed{5} million",
        r"$\boxed{5}$ million",
        r"\boxed{5}\text{ million}",
        r"-\boxed{5}",
        r"$-\boxed{5}$",
        r"2\boxed{5}",
        r"\sqrt{\boxed{5}}",
        r"x^{\boxed{5}}",
        r"\frac{\boxed{5}}{2}",
        r"\boxed{5}^2",
        r"\boxed{5}x",
        r"\boxed{5}/2",
        r"\boxed{5}.5",
        r"\boxed{5}00",
        r"\boxed{5} + 1",
        r"\boxed{5}\cdot 2",
        r"\boxed{5}!",
        r"\boxed{4} or \boxed{5}",
        r"\boxed{4}, \boxed{5}",
        r"\boxed{5} or 6",
        r"$4$ or \boxed{5}",
        "<answer>5</answer> or 6",
        "<answer>5?</answer>",
        "5?",
        "Is it 5?",
        "If x = 5, is it right?",
        "Let x = 5.",
        "about 5",
        "≈5",
        "~5",
        r"\approx 5",
        r"$x \approx 5$",
        "up to 5",
        "under 5",
        "x > 5",
        "x ≠ 5",
        "x<5",
        "less than or equal to 5",
        "minus 5",
        "negative 5",
        "- 5",
        "-$5$",
        "The answer is -$5$",
        "—5",
        "－5",
        "-(5)",
        "10 - 5",
        "10 + 5",
        "10*5",
        "2 times 5",
        "2 x 5",
        "one over 5",
        "twice 5",
        "half of 5",
        "the square root of 5",
        "ln 5",
        "2 to the power of 5",
        "twenty 5",
        "zero point 5",
        "5 and a half",
        "5½",
        "5!",
        "5M",
        "5 M",
        "$5M",
        "1 2 3 4 5",
        "1, 2, 3, 4, 5",
        "4-5",
        "from 4 to 5",
        "(4, 5)",
        "[4, 5]",
        "2 : 5",
        "1 005",
        "step 5",
        "3 (mod 5)",
        "10 choose 5",
        "x5",
        "10C5",
        "5 per cent",
        "sqrt of 5",
        r"\boxed{5}e3",
        r"\boxed{5 \text{ plus some}}",
        "The answer is one of 4 and $5$",
        "The answer is $5$ and a half",
        "The answer is $5$x",
        "The answer is $5$$6$",
        "The answer is 2$5$",
        "The answer is twice $5$",
    ] {
        check(text, 0.0);
    }
    for text in [
        "5",
        "5.",
        "It is 5.",
        "She has 5 apples left.",
        "so 5 km",
        "Total: 5",
        "Total:\n- 5",
        "x = 5",
        "$x = 5$",
        "**5**",
        "The total is 40+2-37 = 5",
        "Not 4 but 5",
        "It isn't 4, it is 5.",
        "If x is 2, y is 5.",
        "a total of 5 apples",
        r"$$\boxed{5}$$",
        r"**\boxed{5}**",
        r"\[\boxed{5}\]",
        r"\boxed{5}\text{ cm}",
        r"\boxed{5} dollars, of which 2 are left",
        r"It is not 4: \boxed{5}.",
        r"\boxed{4}, no, \boxed{5}",
        r"\boxed{5}\n\boxed{5}",
        r"\boxed{5}, as 2+3=5",
        "The answer is $5$ cm.",
        "The answer is 5 apples",
        "<answer>5</answer>.",
        r"- \(x\) is 5",
        "the answer, not 4, is 5",
    ] {
        check(text, 1.0);
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert_eq!(score("-5", "The answer is -$5$", true), 1.0);
    assert_eq!(score("3.14", "It is about 3.14", true), 1.0);
    assert_eq!(score(r"5\%", "It is $5$%", true), 1.0);
}

#[test]
fn the_gold_answer_may_be_a_solution() {
    assert_eq!(score("2 + 3 = 5\n#### 5", "5", true), 1.0);
    assert_eq!(score(r"hence $\boxed{\frac{1}{2}}$", "0.5", true), 1.0);
    assert_eq!(gold_answer(" "), "");
}

#[test]
fn the_tolerance_is_bounded_by_the_last_digit() {
    let within = |tolerance, gold, predicted| is_equal(gold, predicted, Options { tolerance, ..OPTIONS });
    assert!(within(0.01, "3.14", r"\pi") && !within(1e-6, "3.14", r"\pi"));
    assert!(!within(0.1, "3.14", "3.15") && !within(0.1, "3", "3.01"));
    assert!(within(0.0, "0.5", "1/2"));
}

/// Limit of the processor time of a completion; a busy machine gets more attempts below.
const LONGEST: Duration = Duration::from_millis(50);

/// Processor time of this thread, which the kernel counts; the clock where it does not.
fn processor_time() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let counted = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = counted.and_then(|text| text.split(' ').next()?.parse().ok());
    nanoseconds.map_or_else(|| START.elapsed(), Duration::from_nanos)
}

fn check_time(gold: &str, text: &str) {
    let mut tries = (0..3).map(|_| {
        let (started, began) = (processor_time(), Instant::now());
        // An empty gold answer equals nothing, which must be fast too.
        is_right(gold, text, true);
        began.elapsed().min(processor_time().saturating_sub(started))
    });
    let in_time = tries.any(|elapsed| elapsed <= LONGEST);
    let start = |text: &str| text.chars().take(100).collect::<String>();
    assert!(in_time, "slow: {} | {}", start(gold), start(text));
}

#[test]
fn hostile_text_is_wrong_and_not_slow() {
    for piece in [
        r"\boxed{",
        r"\boxed{}",
        "<answer>",
        "<answer>1</answer>",
        "maybe ",
        "x = 4 or ",
        "x>2, ",
        "{",
        "(",
        "[",
        "|",
        "-",
        r"\frac",
        r"\sqrt",
        "x^",
        "!",
        "2^",
        r"\sin ",
        "$",
        r"\(",
        "answer is ",
        "#### ",
        "9",
        "1,",
        "1,234",
        "e",
        r"\pm ",
        "9^9",
        "(((",
        r"\{",
        "x+",
        "/x",
        "</think>",
        " ",
        "\\",
        r"\text{",
        "½",
        "=",
        r"\begin{pmatrix}",
        "&",
        "_1",
        "%",
        "|x",
        "x|",
        "1e9",
        r"\overline{",
        "2400!+",
        "n!+",
        r"\binom{2400}{n}+",
        "和",
        "5万",
        "wait, that is wrong. ",
        r"\boxed{1}, ",
        r"\\boxed{1} and ",
        "$1$, ",
        "not 5 ",
        r"\begin{cases}",
        "x_1^{2}_",
        "f(x)=",
        "0.3...",
        "<|im_end|>",
        "I hope it is correct. ",
        "24 m² ",
        "Answer: The $n$ is ",
        "Answer: Tom has ",
        "there are 12 that are ",
        "is not 10 which is ",
        "between ",
        "|x|<",
        "p=5,q=2;",
        "0.0833333333333333,",
        r"\sum_{k=1}^{n}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\begin{pmatrix}x&\sin x\\3&4\end{pmatrix}+",
    ] {
        for count in [10, 60, 300, 20_000] {
            let text = piece.repeat(count);
            check_time("5", &text);
            check_time("5", &format!(r"\boxed{{{text}}}"));
            check_time(&text.clone(), &format!(r"\boxed{{{text}1}}"));
        }
    }
    let tower = "9^{".repeat(30) + "9" + &"}".repeat(30);
    let absolute = r"\left|".repeat(35) + "x" + &r"\right|".repeat(35);
    let set: Vec<String> = (0..60).map(|n| format!("\\sin({n}x)")).collect();
    let other: Vec<String> = (0..60).map(|n| format!("\\cos({n}x)")).collect();
    let (set, other) = (set.join(", "), other.join(", "));
    let repeats = format!(r"\{{{set}, {set}\}}");
    let row = ["7"; 5].join("&");
    let matrix = format!(r"\begin{{pmatrix}}{}\end{{pmatrix}}", [&*row; 5].join(r"\\"));
    let product = matrix.repeat(8);
    for (gold, predicted) in [
        (&tower, &absolute),
        (&absolute, &tower),
        (&set, &other),
        (&set, &set),
        (&other, &set),
        (&set, &repeats),
        (&matrix, &product),
        (&product, &product),
    ] {
        check_time(gold, &format!(r"\boxed{{{predicted}}}"));
    }
}

#[test]
fn any_text_is_scored() {
    let mut runner = TestRunner::new(Config { cases: 3000, failure_persistence: None, ..Config::default() });
    runner
        .run(&(".{0,40}", ".{0,200}"), |(gold, text)| {
            check_time(&format!("1{gold}"), &text);
            check_time(&format!("1{gold}"), &format!(r"\boxed{{{text}}}"));
            Ok(())
        })
        .unwrap();
}

/// Random strings of tokens, and known answers with a random change. After a change of the parser, run a
/// million cases with `PROPTEST_CASES=1000000`.
#[test]
fn text_of_the_right_shape_is_scored() {
    let count = Config::default().cases.max(20_000);
    const TOKENS: [&str; 60] = [
        "1",
        "2",
        "10",
        "0.5",
        "x",
        "y",
        "e",
        "i",
        r"\pi ",
        "+",
        "-",
        "*",
        "/",
        "^",
        "_",
        "!",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        r"\{",
        r"\}",
        "|",
        ",",
        ";",
        ":",
        "=",
        "<",
        ">",
        r"\le ",
        r"\frac",
        r"\sqrt",
        r"\sin ",
        r"\ln ",
        r"\log_",
        r"\pm ",
        r"\cup ",
        r"\infty ",
        r"\in ",
        r"\text{cm}",
        r"\text{ or }",
        "%",
        r"^\circ ",
        "$",
        " ",
        r"\boxed{",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        "&",
        r"\\",
        r"\binom",
        r"\left|",
        r"\right|",
        r"\overline{3}",
        "e5",
        ".",
        "1,234",
        "½",
    ];
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let known: Vec<&str> = cases().flat_map(|(_, gold, predicted)| [gold, predicted]).collect();
    for _ in 0..count {
        let mut text = || {
            let mut below = |bound: usize| rng.next_u32() as usize % bound;
            if below(2) == 0 {
                let length = 1 + below(24);
                return (0..length).map(|_| TOKENS[below(TOKENS.len())]).collect::<String>();
            }
            let mut text = known[below(known.len())].to_owned();
            let at =
                (0..=text.len()).rev().find(|at| *at <= below(text.len() + 1) && text.is_char_boundary(*at));
            text.insert_str(at.unwrap_or(0), TOKENS[below(TOKENS.len())]);
            text
        };
        let (gold, predicted) = (text(), text());
        check_time(&format!("1{gold}"), &format!(r"\boxed{{{predicted}}}"));
        check_time(&format!("1{gold}"), &predicted);
    }
}
