//! Countdown: an expression that uses each of the given digits once and evaluates to the target.

use super::Record;

/// Evaluates an expression of digits, `+`, `-` and `*` without parentheses, products before sums. Returns its
/// digits and its value, `None` for any other text.
pub fn read(text: &str) -> Option<(Vec<u32>, i64)> {
    /// Expected texts are short, and products of this many digits fit 64 bits.
    const MOST: usize = 16;
    let (mut digits, mut sum, mut product, mut sign) = (Vec::new(), 0i64, 1i64, 1i64);
    for (index, c) in text.chars().enumerate() {
        if index > 2 * MOST {
            return None;
        }
        if index % 2 == 0 {
            let digit = c.to_digit(10)?;
            digits.push(digit);
            product *= i64::from(digit);
            continue;
        }
        match c {
            '*' => continue,
            '+' | '-' => sum += sign * product,
            _ => return None,
        }
        (product, sign) = (1, if c == '-' { -1 } else { 1 });
    }
    // An odd length means that no operator is last.
    (text.len() % 2 == 1).then_some((digits, sum + sign * product))
}

/// The sorted digits and the target of a prompt such as `2,7,9=23>`.
pub fn problem(prompt: &str) -> Option<(Vec<u32>, i64)> {
    let (digits, target) = prompt.strip_suffix('>')?.split_once('=')?;
    let digits: Option<Vec<u32>> =
        digits.split(',').map(|it| it.parse().ok().filter(|digit| *digit < 10)).collect();
    Some((digits?, target.parse().ok()?))
}

/// All solvable problems of `numbers` digits from 1 to 9 with a target from 0 to 99, each with one solution.
pub(super) fn records(numbers: u32) -> Vec<Record> {
    let mut solutions = std::collections::BTreeMap::new();
    let operators = 3u32.pow(numbers - 1);
    for digits in 0..9u32.pow(numbers) {
        let digits: Vec<u32> = (0..numbers).map(|place| digits / 9u32.pow(place) % 9 + 1).collect();
        for operator in 0..operators {
            let expression: String = digits
                .iter()
                .enumerate()
                .map(|(place, digit)| match place {
                    0 => digit.to_string(),
                    _ => format!(
                        "{}{digit}",
                        b"+-*"[(operator / 3u32.pow(place as u32 - 1) % 3) as usize] as char
                    ),
                })
                .collect();
            let (mut digits, value) = read(&expression).expect("made of digits and operators");
            if (0..100).contains(&value) {
                digits.sort_unstable();
                solutions.entry((digits, value)).or_insert(expression);
            }
        }
    }
    let record = |((digits, target), answer): ((Vec<u32>, i64), String)| {
        let digits: Vec<String> = digits.iter().map(u32::to_string).collect();
        let prompt = format!("{}={target}>", digits.join(","));
        Record { id: prompt.clone(), prompt, answer, ..Record::default() }
    };
    solutions.into_iter().map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read_by_the_rules_of_arithmetic() {
        for (text, expected) in [
            ("7", Some((vec![7], 7))),
            ("2+3*4", Some((vec![2, 3, 4], 14))),
            ("9-2*3-1", Some((vec![9, 2, 3, 1], 2))),
            ("1-2", Some((vec![1, 2], -1))),
            ("", None),
            ("2+", None),
            ("+2", None),
            ("23", None),
            ("2/1", None),
            ("2 + 3", None),
            ("2+3=", None),
            ("2+é", None),
        ] {
            assert_eq!(read(text), expected, "{text:?}");
        }
        assert_eq!(read(&"9*".repeat(100)), None);
    }

    #[test]
    fn every_problem_has_its_solution() {
        let records = records(3);
        assert!(records.len() > 1000, "{}", records.len());
        for record in &records {
            let (mut digits, value) = read(&record.answer).unwrap();
            digits.sort_unstable();
            assert_eq!(problem(&record.prompt), Some((digits, value)), "{record:?}");
        }
        assert_eq!(problem("2,7=>"), None);
        assert_eq!(problem("2,7=9"), None);
        assert_eq!(problem("27=9>"), None);
    }
}
