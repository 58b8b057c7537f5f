//! The trackers of metrics: their fields, and the packages of their interpreter.

use super::*;

#[test]
fn fields_of_trackers_are_checked() {
    let good = "metrics={wandb: {project: a b, tags: [x]}, trackio: {project: t}, mlflow: {experiment: e}}";
    let loaded = read(SMALL, &[good]).unwrap();
    let metrics = &loaded.config.metrics;
    assert_eq!((metrics.python.as_str(), metrics.finish_timeout_s), ("python3", 60.0));
    assert_eq!(metrics.wandb.as_ref().unwrap().mode, None);
    let check = |set: &str, field: &str, message: &str| {
        let error = invalid(SMALL, &[set]);
        assert_eq!(error.field, format!("metrics.{field}"), "{error}");
        assert!(error.message.contains(message), "{error}");
    };
    check("metrics.wandb={project: ''}", "wandb.project", "empty");
    check("metrics.wandb={project: a/b}", "wandb.project", "a/b");
    check("metrics.wandb={project: a, tags: [x, '']}", "wandb.tags[1]", "no tag");
    check("metrics.wandb={project: a, group: ''}", "wandb.group", "empty");
    check("metrics.wandb={project: a, mode: of}", "wandb.mode", "of");
    check("metrics.wandb={project: a, projects: b}", "wandb.projects", "no such field");
    check("metrics.trackio={project: ' '}", "trackio.project", "empty");
    check("metrics.mlflow={experiment: ''}", "mlflow.experiment", "empty");
    check("metrics.mlflow={experiment: e, tracking_uri: ''}", "mlflow.tracking_uri", "empty");
    check("metrics={wandb: {project: a}, finish_timeout_s: 0}", "finish_timeout_s", "out of range");
    check("metrics.finish_timeout_s=5", "finish_timeout_s", "none is named");
    check("metrics.python=python3.13", "python", "none is named");
}

/// Packages are looked for on the host of rank 0, which starts the trackers, and not for a plan.
#[test]
fn rank_0_needs_the_packages() {
    // A Python that says that it lacks one, without being one.
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python");
    std::fs::write(&python, "#!/bin/sh\necho '{\"missing\": [\"mlflow\"]}'\n").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&python, executable).unwrap();
    let set = format!(
        "metrics={{mlflow: {{experiment: e}}, trackio: {{project: p}}, python: {}}}",
        python.display()
    );
    let loaded = read(SMALL, &[&set]).unwrap();
    let error = only_problem(loaded.resolve(&machine()).unwrap_err());
    assert_eq!(error.field, "metrics.mlflow", "{error}");
    assert!(error.help.contains("-m pip install mlflow"), "{error}");
    assert!(loaded.resolve_but_stage(&machine()).is_ok());

    let mute = "metrics={mlflow: {experiment: e}, python: 'true'}";
    let error = only_problem(read(SMALL, &[mute]).unwrap().resolve(&machine()).unwrap_err());
    assert_eq!(error.field, "metrics.python", "{error}");
}
