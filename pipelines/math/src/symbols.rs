//! Signs, names and commands, and the tokens that they are.

use super::expr::{Constant, Function, Relation};
use super::foreign::is_percent;
use super::token::Token;

/// Runs of two letters that are words or units, not products.
pub(super) const SHORT_WORDS: [&str; 37] = [
    "no", "on", "is", "if", "to", "of", "in", "at", "as", "by", "we", "so", "it", "an", "am", "pm", "do",
    "up", "go", "cm", "mm", "km", "kg", "mg", "ml", "ft", "mi", "hr", "oz", "lb", "st", "nd", "rd", "th",
    "us", "he", "me",
];

pub(super) const TWO_SIGNS: [(&str, Token); 10] = [
    ("{:}", Token::Colon),
    ("**", Token::Power),
    ("<=", Token::Relation(Relation::LessEqual)),
    (">=", Token::Relation(Relation::GreaterEqual)),
    ("!=", Token::Relation(Relation::NotEqual)),
    ("==", Token::Relation(Relation::Equal)),
    ("=<", Token::Relation(Relation::LessEqual)),
    ("+/-", Token::PlusMinus),
    ("+-", Token::PlusMinus),
    ("·", Token::Times),
];

pub(super) fn symbol(first: char) -> Option<Token> {
    Some(match first {
        '+' => Token::Plus,
        '-' | '−' | '–' => Token::Minus,
        '±' => Token::PlusMinus,
        '∓' => Token::MinusPlus,
        '*' | '×' | '⋅' => Token::Times,
        '/' | '÷' => Token::Divide,
        '^' => Token::Power,
        '_' => Token::Subscript,
        '!' => Token::Factorial,
        '%' => Token::Percent,
        '°' => Token::Degree,
        ',' | ';' => Token::Comma,
        ':' => Token::Colon,
        '(' => Token::Open('('),
        ')' => Token::Close('('),
        '[' => Token::Open('['),
        ']' => Token::Close('['),
        '{' => Token::Open('<'),
        '}' => Token::Close('<'),
        '|' => Token::Bar,
        '&' => Token::NextCell,
        '=' => Token::Relation(Relation::Equal),
        '≈' => Token::Relation(Relation::About),
        '≠' => Token::Relation(Relation::NotEqual),
        '<' => Token::Relation(Relation::Less),
        '≤' => Token::Relation(Relation::LessEqual),
        '>' => Token::Relation(Relation::Greater),
        '≥' => Token::Relation(Relation::GreaterEqual),
        '∈' => Token::Relation(Relation::In),
        '∪' => Token::Union,
        '∅' => Token::EmptySet,
        '\'' => Token::Prime,
        '√' => Token::SquareRoot,
        '∞' => Token::Constant(Constant::Infinity),
        'π' => Token::Constant(Constant::Pi),
        'α'..='ω' | 'Α'..='Ω' | 'µ' | 'ϕ' => Token::Symbol(greek(first)?.into()),
        '$' | '€' | '£' | '¥' | '₹' | '₽' | '₩' | '¢' => Token::Word(first.to_string()),
        _ => return None,
    })
}

/// Name of a Greek letter, as in LaTeX.
fn greek(letter: char) -> Option<&'static str> {
    const NAMES: &str = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma \
        sigma tau upsilon phi chi psi omega";
    const CAPITALS: [(char, &str); 10] = [
        ('Γ', "Gamma"),
        ('Δ', "Delta"),
        ('Θ', "Theta"),
        ('Λ', "Lambda"),
        ('Ξ', "Xi"),
        ('Π', "Pi"),
        ('Σ', "Sigma"),
        ('Φ', "Phi"),
        ('Ψ', "Psi"),
        ('Ω', "Omega"),
    ];
    match letter {
        'µ' => Some("mu"),
        'ϕ' => Some("phi"),
        'α'..='ω' => NAMES.split_whitespace().nth((letter as u32 - 'α' as u32) as usize),
        _ => CAPITALS.iter().find(|(capital, _)| *capital == letter).map(|(_, name)| *name),
    }
}

pub(super) fn letter(letter: char) -> Token {
    match letter {
        'e' => Token::Constant(Constant::E),
        'i' => Token::Constant(Constant::I),
        other => Token::Symbol(other.to_string()),
    }
}

/// Words with a meaning in mathematics, or units.
pub(super) fn phrase(word: &str) -> Option<Token> {
    match word {
        "and" => Some(Token::And),
        "or" => Some(Token::Or),
        "und" | "和" | "与" | "與" | "及" | "以及" | "и" | "と" | "및" => Some(Token::And),
        "oder" | "或" | "或者" | "или" | "または" | "또는" => Some(Token::Or),
        "percent" => Some(Token::Percent),
        word if is_percent(word) => Some(Token::Percent),
        "degree" | "degrees" => Some(Token::Degree),
        _ => None,
    }
}

/// Numbers and variables with names of several letters, spelled the same in LaTeX and plain notation.
pub(super) fn named(name: &str) -> Option<Token> {
    const SYMBOLS: [&str; 20] = [
        "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "sigma", "omega", "Omega", "Delta",
        "Gamma", "phi", "rho", "Theta", "Lambda", "Sigma", "Phi", "Psi", "Pi",
    ];
    match name {
        "pi" => Some(Token::Constant(Constant::Pi)),
        _ if SYMBOLS.contains(&name) => Some(Token::Symbol(name.to_owned())),
        _ => None,
    }
}

pub(super) fn function(name: &str) -> Option<Function> {
    use Function::*;
    Some(match name {
        "sin" => Sin,
        "cos" => Cos,
        "tan" => Tan,
        "cot" => Cot,
        "sec" => Sec,
        "csc" => Csc,
        "arcsin" | "asin" => Arcsin,
        "arccos" | "acos" => Arccos,
        "arctan" | "atan" => Arctan,
        "sinh" => Sinh,
        "cosh" => Cosh,
        "tanh" => Tanh,
        "exp" => Exp,
        "ln" => Ln,
        "log" | "lg" => Log,
        "abs" => Abs,
        "floor" => Floor,
        "ceil" => Ceiling,
        _ => return None,
    })
}

/// Returns true if `name` is a LaTeX command that an answer may contain.
pub(super) fn is_command(name: &str) -> bool {
    const OTHERS: &str = "boxed fbox frac dfrac tfrac cfrac sqrt text textbf textit textrm textnormal mathrm mathbf mathbb mbox \
        left right begin end binom dbinom tbinom operatorname overline quad qquad pmod bmod displaystyle angle triangle \
        vec hat bar circ cancel";
    OTHERS.split_whitespace().any(|other| other == name) || command(name).is_some()
}

/// A LaTeX command that is a single token.
pub(super) fn command(name: &str) -> Option<Token> {
    if let Some(function) = function(name) {
        return Some(Token::Function(function));
    }
    Some(match name {
        "cdot" | "times" | "ast" => Token::Times,
        "div" => Token::Divide,
        "setminus" | "backslash" | "smallsetminus" => Token::SetMinus,
        "over" => Token::Over,
        "choose" => Token::ChooseInfix,
        "prime" => Token::Prime,
        "lor" | "vee" => Token::Or,
        "land" | "wedge" => Token::And,
        "equiv" => Token::Relation(Relation::Congruent),
        "int" | "iint" | "oint" | "sum" | "prod" | "lim" | "gcd" | "max" | "min" | "det" | "dim" | "deg"
        | "Pr" | "cap" | "notin" | "to" | "rightarrow" | "partial" | "nabla" | "circ" | "sup" | "inf" => {
            Token::Operator(name.to_owned())
        }
        "pm" => Token::PlusMinus,
        "mp" => Token::MinusPlus,
        "infty" => Token::Constant(Constant::Infinity),
        "leq" | "le" | "leqslant" => Token::Relation(Relation::LessEqual),
        "geq" | "ge" | "geqslant" => Token::Relation(Relation::GreaterEqual),
        "lt" => Token::Relation(Relation::Less),
        "gt" => Token::Relation(Relation::Greater),
        "neq" | "ne" => Token::Relation(Relation::NotEqual),
        "approx" => Token::Relation(Relation::About),
        "in" => Token::Relation(Relation::In),
        "cup" => Token::Union,
        "emptyset" | "varnothing" => Token::EmptySet,
        "degree" => Token::Degree,
        "lbrace" => Token::Open('{'),
        "rbrace" => Token::Close('{'),
        "lbrack" => Token::Open('['),
        "rbrack" => Token::Close('['),
        "langle" => Token::Open('('),
        "rangle" => Token::Close('('),
        "lfloor" => Token::Open('f'),
        "rfloor" => Token::Close('f'),
        "lceil" => Token::Open('c'),
        "rceil" => Token::Close('c'),
        "lvert" => Token::Open('|'),
        "rvert" => Token::Close('|'),
        "vert" | "mid" => Token::Bar,
        "varphi" => Token::Symbol("phi".into()),
        "mu" | "nu" | "xi" | "tau" | "psi" | "chi" | "eta" | "zeta" | "kappa" | "ell" => {
            Token::Symbol(name.to_owned())
        }
        _ => return named(name),
    })
}
