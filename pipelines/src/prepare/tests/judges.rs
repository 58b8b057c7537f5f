//! Templates of a judge's question, and patterns of its number.

use super::*;

fn reward(fields: &str) -> String {
    format!("pipeline.rlvr.reward=[{{judge: {{url: http://here, model: m, {fields}}}}}]")
}

#[test]
fn a_judges_pattern_and_template_are_checked() {
    assert!(read(SMALL, &[&reward("template: '{{ prompt }}{{ completion }}{{ answer }}'")]).is_ok());
    let check = |fields: &str, field: &str, message: &str, help: &str| {
        let error = invalid(SMALL, &[&reward(fields)]);
        assert_eq!(error.field, format!("pipeline.rlvr.reward[0].judge.{field}"), "{error}");
        assert!(error.message.contains(message) && error.help.contains(help), "{error}");
    };
    check("template: t, pattern: '('", "pattern", "it is not a valid pattern: unclosed group", "one group");
    check("template: t, pattern: '[0-9]+'", "pattern", "it has 0 groups", "one group, around the number");
    check("template: '{{ prompt'", "template", "syntax error", "`{{ completion }}`");
    check("template: '{{ response }}'", "template", "unknown variable `response`", "`{{ completion }}`");
}

/// Keys are checked on the machine of the run, and not for a plan.
#[test]
fn keys_are_looked_for_before_a_run() {
    const NAME: &str = "ANYROLL_TEST_HAS_NO_SUCH_KEY";
    let code =
        format!("pipeline.rlvr.reward=[{{code: {{http: {{url: http://here, key_variable: {NAME}}}}}}}]");
    for (reward, field) in [
        (reward(&format!("template: t, key_variable: {NAME}")), "judge.key_variable"),
        (code, "code.http.key_variable"),
    ] {
        let loaded = read(SMALL, &[&reward]).unwrap();
        let error = only_problem(loaded.resolve(&machine()).unwrap_err());
        assert_eq!(error.field, format!("pipeline.rlvr.reward[0].{field}"), "{error}");
        assert!(error.message.contains(NAME) && error.help.contains("set it"), "{error}");
        assert!(loaded.resolve_but_stage(&machine()).is_ok());
    }
    assert!(resolve(&[&reward("template: t, key_variable: PATH")], &machine()).is_ok());
}
