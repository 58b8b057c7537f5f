//! Shell arithmetic `$((...))`: integers, variables, `+ - * / %` and parentheses.

use std::{iter::Peekable, str::Chars};

/// Value of `sum`; `None` for other operators or overflow of 64 bits.
pub(super) fn value(sum: &str, variable: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let mut reader = Reader { rest: sum.chars().peekable(), variable };
    let value = reader.sum(0)?;
    reader.space();
    reader.rest.next().is_none().then_some(value)
}

/// Limit of nested parentheses and signs; a script has a few.
const MOST_NESTED: usize = 64;

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
    variable: &'a dyn Fn(&str) -> Option<i64>,
}

impl Reader<'_> {
    fn space(&mut self) {
        while self.rest.next_if(|next| next.is_whitespace()).is_some() {}
    }

    fn operator(&mut self, operators: &str) -> Option<char> {
        self.space();
        self.rest.next_if(|next| operators.contains(*next))
    }

    fn sum(&mut self, depth: usize) -> Option<i64> {
        let mut value = self.product(depth)?;
        while let Some(operator) = self.operator("+-") {
            let right = self.product(depth)?;
            value = if operator == '+' { value.checked_add(right)? } else { value.checked_sub(right)? };
        }
        Some(value)
    }

    fn product(&mut self, depth: usize) -> Option<i64> {
        let mut value = self.factor(depth)?;
        while let Some(operator) = self.operator("*/%") {
            let right = self.factor(depth)?;
            value = match operator {
                '*' => value.checked_mul(right)?,
                '/' => value.checked_div(right)?,
                _ => value.checked_rem(right)?,
            };
        }
        Some(value)
    }

    fn factor(&mut self, depth: usize) -> Option<i64> {
        if depth == MOST_NESTED {
            return None;
        }
        match self.operator("(-") {
            Some('(') => {
                let value = self.sum(depth + 1)?;
                self.operator(")").map(|_| value)
            }
            Some(_) => self.factor(depth + 1)?.checked_neg(),
            None => {
                let mut name = String::new();
                while let Some(next) = self.rest.next_if(|next| next.is_ascii_alphanumeric() || *next == '_')
                {
                    name.push(next);
                }
                match name.starts_with(|first: char| first.is_ascii_digit()) {
                    // A leading zero means octal in a shell.
                    true => name.parse().ok().filter(|_| name == "0" || !name.starts_with('0')),
                    false => (self.variable)(&name),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_a_shell() {
        let variable = |name: &str| (name == "n").then_some(7);
        for (sum, expected) in [
            ("1024 * 8", Some(8192)),
            (" 2+3*4 - -1 ", Some(15)),
            ("(2+3)*4%7/2", Some(3)),
            ("n * n", Some(49)),
            ("m + 1", None),
            ("1 / 0", None),
            ("1 +", None),
            ("010", None),
            ("1 2", None),
            ("9223372036854775807 + 1", None),
            ("", None),
        ] {
            assert_eq!(value(sum, &variable), expected, "{sum}");
        }
        assert_eq!(value(&"(".repeat(100_000), &variable), None);
    }
}
