use super::*;

#[track_caller]
fn check(script: &str, expected: &[&[&str]]) {
    assert_eq!(commands(script, &mut Variables::default()).unwrap(), expected, "{script}");
}

/// Words of the script's last command.
#[track_caller]
fn check_last(script: &str, expected: &[&str]) {
    let commands = commands(script, &mut Variables::default()).unwrap();
    assert_eq!(commands.last().unwrap(), expected, "{script}");
}

#[test]
fn words_and_quotes() {
    check("a  'b c'\"d \\\" $e\"f \\g ''", &[&["a", "b cd \" $ef", "g", ""]]);
    check("a \"b\\nc\" 'd\\' \"\"", &[&["a", "b\\nc", "d\\", ""]]);
    check("a $(b; c | (d)) ${e} #f 'g", &[&["a", "$(b; c | (d))", "${e}"]]);
    check("a#b", &[&["a#b"]]);
}

#[test]
fn ends_of_commands() {
    check("a \\\n b\nc \\\r\n d", &[&["a", "b"], &["c", "d"]]);
    check("a && b || c; d & (e | f)", &[&["a"], &["b"], &["c"], &["d"], &["e"], &["f"]]);
}

#[test]
fn redirections_are_no_words() {
    check("a 3 2>&1 | b", &[&["a", "3"], &["b"]]);
    check("a >log 4 &>> 'l o g' 5 2>/dev/null <<END\nc\nEND", &[&["a", "4", "5", "c\n"]]);
}

#[test]
fn variables_that_the_script_assigns() {
    check_last("A=1; B=$A/2\na $B ${B}x \"$A $B\" '$A' $C", &["a", "1/2", "1/2x", "1 1/2", "$A", "$C"]);
    check_last("export A='b c' D; declare A+=d\na $A \"$A\" x=$A", &["a", "b", "cd", "b cd", "x=b", "cd"]);
    check_last("A=x B=y a $A", &["A=x", "B=y", "a", "$A"]);
    check_last(
        "A=${A:-m/n}; B=${B:=\"${A} ${C:-d}\"}; E=\na \"$B\" ${E:-e} ${1:-f}",
        &["a", "m/n d", "e", "f"],
    );
    check_last("n=$((2 * 1024)); a $((n + 1)) $(( (n + $n) / 3 )) $((m))", &["a", "2049", "1365", "$((m))"]);
    check_last("a ${A%x} ${#A} $(b $A) $1", &["a", "${A%x}", "${#A}", "$(b $A)", "$1"]);
}

#[test]
fn lists_and_the_scripts_own_arguments() {
    let lists = "n=2\nA=(\n    b.c=\"d e\" # f\n    g=${n}\n)\nA+=(h)\nN=()\n";
    check_last(
        &format!("{lists}a \"${{A[@]}}\" \"${{N[@]}}\" \"$@\" $@ z"),
        &["a", "b.c=d e", "g=2", "h", "z"],
    );
    check_last(
        &format!("{lists}a ${{A[*]}} $A \"${{M[@]}}\""),
        &["a", "b.c=d e", "g=2", "h", "b.c=d", "e", "${M[@]}"],
    );
}

#[test]
fn what_may_never_have_run_assigns_nothing_that_is_known() {
    for script in [
        "A=1\nif b; then\n A=2\nfi",
        "A=1; b && A=2",
        "A=1; b ||\n A=2",
        "f() {\n A=2\n}",
        "function f {\n A=2\n}",
        "for x in 1 2; do A=$x; done",
        "A=1; case b in b) A=2;; esac",
        "if b; then A=(c); fi",
    ] {
        check_last(&format!("{script}\na $A ${{A:-3}}"), &["a", "$A", "${A:-3}"]);
    }
    check_last("A=1; if b; then A=1; fi; C=2; a $A $C", &["a", "1", "2"]);
}

#[test]
fn lists_that_may_have_changed_keep_what_stays() {
    for (change, expected) in [
        ("A=(x=1 y=3)", &["x=1", "y=${A[@]}"][..]),
        ("A+=(z=1)", &["x=1", "y=2", "z=${A[@]}"]),
        ("A=(x=1 y=2)", &["x=1", "y=2"]),
        ("A=()", &["x=${A[@]}", "y=${A[@]}"]),
        ("A=(x=1 word)", &["${A[@]}"]),
        ("A=b", &["${A[@]}"]),
    ] {
        let expected: Vec<&str> = ["a"].iter().chain(expected).copied().collect();
        check_last(&format!("A=(x=1 y=2)\nif b; then\n {change}\nfi\na \"${{A[@]}}\""), &expected);
    }
}

#[test]
fn what_is_never_closed_is_said() {
    for (script, expected) in [
        ("a\nb 'c\nd", "' in line 2"),
        ("\"a", "\" in line 1"),
        ("$(a", "`$(`"),
        ("\na=(b\n c", "`a=(` in line 2"),
        (&*"${a:-".repeat(100_000), "nested too deeply"),
    ] {
        let error = commands(script, &mut Variables::default()).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn what_is_not_known_is_told_from_what_is() {
    for word in ["$a", "x${a}", "$(b)", "$1", "$_"] {
        assert!(!is_expanded(word), "{word}");
    }
    for word in ["", "a", "^a$", "5$", "$ 5", "a$/b"] {
        assert!(is_expanded(word), "{word}");
    }
}
