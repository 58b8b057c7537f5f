//! Ranges of the numbers of a section.

/// A number of a section and what must hold of it.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// The field.
    pub field: &'static str,
    /// Its value.
    pub value: f64,
    /// True if it is in range.
    pub holds: bool,
    /// The range, behind "write".
    pub range: &'static str,
    /// Another field that the range depends on.
    pub given: Option<&'static str>,
}

impl Range {
    /// Makes the range of the field `field`.
    pub fn new(field: &'static str, value: f64, holds: bool, range: &'static str) -> Self {
        Self { field, value, holds, range, given: None }
    }

    /// The same range, which depends on the field `other`.
    pub fn given(self, other: &'static str) -> Self {
        Self { given: Some(other), ..self }
    }
}
