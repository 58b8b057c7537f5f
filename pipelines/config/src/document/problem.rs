//! Collects the problems of a config: every section reports to one list, and validation continues.

use std::cell::RefCell;

use super::error::{Invalid, Origin, Source};
use super::tree::Node;

/// A problem of a config, without the text of its position.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Full path of the field.
    pub field: String,
    /// Position of the field's value.
    pub origin: Origin,
    /// Description of the problem.
    pub message: String,
    /// The fix.
    pub help: String,
}

impl Problem {
    /// Returns true if `other` is a problem of the same text, which YAML's aliases repeat below another field.
    fn is_aliased_as(&self, other: &Self) -> bool {
        let name = |field: &str| field.rsplit('.').next().map(str::to_owned);
        let is_of_file = matches!(self.origin, Origin::File { .. });
        let is_same = (self.origin, &self.message) == (other.origin, &other.message);
        is_of_file && is_same && name(&self.field) == name(&other.field)
    }
}

/// All problems of a config.
///
/// A field has at most one problem, the first that is reported. If a field could not be read, the field has a stand-in.
/// Further problems of that field and of fields below it are not reported.
#[derive(Debug)]
pub struct Problems<'a> {
    tree: &'a Node,
    found: RefCell<Vec<Problem>>,
    stand_ins: Vec<String>,
}

impl<'a> Problems<'a> {
    /// Returns the problems of a config that was read from `tree`. `stand_ins` are the fields that could not be read,
    /// and `found` are their problems.
    pub fn new(tree: &'a Node, found: Vec<Problem>, stand_ins: Vec<String>) -> Self {
        Self { tree, found: RefCell::new(found), stand_ins }
    }

    /// Returns the whole config as a section.
    pub fn root(&self) -> Section<'_> {
        Section { problems: self, path: String::new(), is_moot: false }
    }

    /// Returns true if nothing was reported.
    pub fn is_empty(&self) -> bool {
        self.found.borrow().is_empty()
    }

    /// Returns all problems as messages for the user, in the order of `source`; problems of a `--set` are last.
    pub fn rendered(self, source: &Source) -> Vec<Invalid> {
        let mut found = self.found.into_inner();
        found.sort_by_key(|problem| problem.origin);
        found.into_iter().map(|problem| source.render(problem)).collect()
    }

    fn report(&self, problem: Problem) {
        let mut found = self.found.borrow_mut();
        let is_known =
            found.iter().any(|known| known.field == problem.field || known.is_aliased_as(&problem));
        // A list with an item that could not be read does not have its own value either.
        let is_item =
            |path: &str| path.strip_prefix(&problem.field).is_some_and(|tail| tail.starts_with('['));
        let is_stand_in = |path: &String| is_at_or_below(&problem.field, path) || is_item(path);
        let has_value = !self.stand_ins.iter().any(is_stand_in);
        if !is_known && has_value {
            found.push(problem);
        }
    }

    /// Returns true if there is no problem of `field`, of its parts, or of the sections around it.
    fn is_sound(&self, field: &str) -> bool {
        let meets = |other: &str| is_at_or_below(other, field) || is_at_or_below(field, other);
        !self.found.borrow().iter().any(|problem| meets(&problem.field))
            && !self.stand_ins.iter().any(|path| meets(path))
    }
}

/// Returns true if the field `path` is `other` or a part of it.
pub(super) fn is_at_or_below(path: &str, other: &str) -> bool {
    let tail = path.strip_prefix(other);
    tail.is_some_and(|tail| tail.is_empty() || other.is_empty() || tail.starts_with(['.', '[']))
}

/// Returns the path of `name` below `path`; an index such as `[1]` follows without a dot.
pub(super) fn join(path: &str, name: &str) -> String {
    if path.is_empty() || name.is_empty() || name.starts_with('[') {
        format!("{path}{name}")
    } else {
        format!("{path}.{name}")
    }
}

/// A section of a config that is validated. Fields are named relative to the section, such as `schedule.linear`; an
/// empty name is the section itself.
#[derive(Clone, Debug)]
pub struct Section<'a> {
    problems: &'a Problems<'a>,
    path: String,
    /// True if a field that the next checks compare with has a problem.
    is_moot: bool,
}

impl<'a> Section<'a> {
    /// Returns the section `name` below this one.
    pub fn below(&self, name: &str) -> Self {
        Self { path: self.field(name), ..self.clone() }
    }

    /// Returns an item of this section, which is a list.
    pub fn item(&self, index: usize) -> Self {
        self.below(&format!("[{index}]"))
    }

    /// Returns the whole config as a section.
    pub fn root(&self) -> Section<'a> {
        Section { path: String::new(), ..self.clone() }
    }

    /// Returns this section for checks that compare with the fields `names`. If one of these fields has a problem, the
    /// checks report nothing, since further problems would only follow from it.
    pub fn given(&self, names: &[&str]) -> Self {
        let is_moot = self.is_moot || names.iter().any(|name| !self.is_sound(name));
        Self { is_moot, ..self.clone() }
    }

    /// Returns this section for checks that report only if `holds`.
    pub fn when(&self, holds: bool) -> Self {
        Self { is_moot: self.is_moot || !holds, ..self.clone() }
    }

    /// Returns the path of the field `name` from the config's top.
    pub fn field(&self, name: &str) -> String {
        join(&self.path, name)
    }

    /// Returns true if the field `name` has no problem so far.
    pub fn is_sound(&self, name: &str) -> bool {
        self.problems.is_sound(&self.field(name))
    }

    /// Returns true if the field `name` could be read: its value is no stand-in, nor a part of one.
    pub fn is_read(&self, name: &str) -> bool {
        let field = self.field(name);
        !self.problems.stand_ins.iter().any(|path| is_at_or_below(&field, path))
    }

    /// Returns true if the value of the field `name`, or of the nearest section around it, is from a `--set`.
    pub fn is_of_set(&self, name: &str) -> bool {
        matches!(self.problems.tree.origin_of(&self.field(name)), Origin::Set(_))
    }

    /// Returns true if all items of this section, a list, could be read. Otherwise the items after an unread one have
    /// other indices.
    pub fn has_all_items(&self) -> bool {
        let is_item = |path: &str| {
            let index =
                path.strip_prefix(&self.path).and_then(|tail| tail.strip_prefix('[')?.strip_suffix(']'));
            index.is_some_and(|index| index.parse::<usize>().is_ok())
        };
        !self.problems.stand_ins.iter().any(|path| is_item(path))
    }

    /// Returns true if the config has no problem so far.
    pub fn is_config_sound(&self) -> bool {
        self.problems.is_empty()
    }

    /// Reports a problem of the field `name` unless `holds`. Returns `holds`.
    pub fn ensure(
        &self,
        holds: bool,
        name: &str,
        message: impl Into<String>,
        help: impl Into<String>,
    ) -> bool {
        if !holds {
            self.refuse(name, message, help);
        }
        holds
    }

    /// Reports a problem of the field `name`.
    pub fn refuse(&self, name: &str, message: impl Into<String>, help: impl Into<String>) {
        if self.is_moot {
            return;
        }
        let field = self.field(name);
        let origin = self.problems.tree.origin_of(&field);
        let (message, mut help) = (message.into(), help.into());
        if message.contains(" ~/") {
            help.push_str("; `~` stands for no folder here: write the whole path");
        }
        self.problems.report(Problem { field, origin, message, help });
    }

    /// Returns the value, or `None` after reporting a problem of the field `name`.
    pub fn take<T, E>(
        &self,
        value: Result<T, E>,
        name: &str,
        message: impl FnOnce(&E) -> String,
        help: impl Into<String>,
    ) -> Option<T> {
        value.map_err(|error| self.refuse(name, message(&error), help)).ok()
    }

    /// Requires a size from 1 to a bound that keeps products of sizes within 64 bits.
    pub fn positive(&self, name: &str, value: impl TryInto<u64>) -> bool {
        const MOST: u64 = 1 << 31;
        let value = value.try_into().unwrap_or(u64::MAX);
        let message = if value == 0 { "it is 0" } else { "it is too large" };
        let help = format!("write a whole number, 1 or above, at most {MOST}");
        self.ensure((1..=MOST).contains(&value), name, message, help)
    }

    /// Requires a number of threads or processes that this machine is to start.
    pub fn number_of_threads(&self, name: &str, value: usize) -> bool {
        const MOST: usize = 4096;
        let help = format!("write a whole number, 1 or above, at most {MOST}");
        self.ensure((1..=MOST).contains(&value), name, format!("{value} is out of range"), help)
    }

    /// Requires a finite number; `range` describes the condition `holds` in words.
    pub fn number(&self, name: &str, value: f64, holds: bool, range: &str) -> bool {
        let holds = holds && value.is_finite();
        self.ensure(holds, name, format!("{value:?} is out of range"), format!("write a number {range}"))
    }

    /// Requires a timeout in seconds.
    pub fn seconds(&self, name: &str, value: f64) -> bool {
        const HOUR_S: f64 = 3600.0;
        let holds = value > 0.0 && value <= HOUR_S;
        self.number(name, value, holds, "of seconds above 0, at most an hour, 3600")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(problems: Problems) -> Vec<String> {
        problems.found.into_inner().into_iter().map(|problem| problem.field).collect()
    }

    #[test]
    fn a_field_has_one_problem() {
        let tree = Node::parse("a: {b: 1}").unwrap();
        let problems = Problems::new(&tree, Vec::new(), vec!["d".to_owned()]);
        let at = problems.root();
        for name in ["a.b", "a.b", "a", "ab", "c[0].x", "d", "d.e", "de"] {
            at.refuse(name, "message", "help");
        }
        assert_eq!(fields(problems), ["a.b", "a", "ab", "c[0].x", "de"]);
    }

    #[test]
    fn a_path_that_a_shell_would_expand_is_told() {
        let tree = Node::parse("a: 1").unwrap();
        let problems = Problems::new(&tree, Vec::new(), Vec::new());
        problems.root().refuse("a", "there is no file ~/b.jsonl", "give its path");
        problems.root().refuse("b", "there is no file b~/b.jsonl", "give its path");
        let helps: Vec<String> = problems.found.into_inner().into_iter().map(|it| it.help).collect();
        assert_eq!(
            helps,
            ["give its path; `~` stands for no folder here: write the whole path", "give its path"]
        );
    }

    #[test]
    fn what_follows_from_a_problem_is_not_reported() {
        let tree = Node::parse("a: {b: 1}").unwrap();
        let problems = Problems::new(&tree, Vec::new(), vec!["e.f".to_owned()]);
        let at = problems.root();
        assert!(!at.below("a").positive("b", 0_u64));
        for (given, holds) in [("a", false), ("a.b", false), ("a.b.c", false), ("a.bc", true), ("e", false)] {
            assert_eq!(at.is_sound(given), holds, "{given}");
            at.given(&["x", given]).refuse(&format!("of.{given}"), "message", "help");
        }
        assert_eq!(fields(problems), ["a.b", "of.a.bc"]);
    }
}
