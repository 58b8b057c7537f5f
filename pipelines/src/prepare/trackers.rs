//! Check of the trackers: the interpreter has their packages.

use anyroll_config::{MetricsConfig, Section};

use crate::trackers::missing_packages;

/// Reports trackers without their package. `at` is the section of the metrics.
pub(super) fn check(metrics: &MetricsConfig, at: &Section) {
    let python = &metrics.python;
    let named: Vec<&str> = metrics.trackers().filter(|name| at.is_sound(name)).collect();
    if named.is_empty() || !at.is_sound("python") {
        return;
    }
    let help = "name in `metrics.python` a Python that works";
    let missing = at.take(missing_packages(python, &named), "python", String::clone, help);
    for package in missing.unwrap_or_default() {
        let help = format!(
            "install it there (`{python} -m pip install {package}`), or name in `metrics.python` an interpreter that has it"
        );
        at.refuse(&package, format!("`{python}` has no package {package}"), help);
    }
}
