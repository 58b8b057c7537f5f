//! Ranges of the numbers of a section.

/// A number of a section and the condition on it.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// The field.
    pub field: &'static str,
    /// The field's value.
    pub value: f64,
    /// True if the value is in range.
    pub holds: bool,
    /// The range in words, after "write".
    pub range: &'static str,
    /// Another field that the range depends on.
    pub given: Option<&'static str>,
}

impl Range {
    /// Makes the range of the field `field`.
    pub fn new(field: &'static str, value: f64, holds: bool, range: &'static str) -> Self {
        Self { field, value, holds, range, given: None }
    }

    /// Returns the same range, dependent on the field `other`.
    pub fn given(self, other: &'static str) -> Self {
        Self { given: Some(other), ..self }
    }
}
