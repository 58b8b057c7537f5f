//! Configs with rollout hosts.

use super::*;

/// Resolves for a rollout host.
fn on_rollout_host(sets: &[&str], machine: &Machine) -> Result<Run, Error> {
    Ok(read(SMALL, sets).unwrap().draft.prepare(machine, Purpose::Rollout)?.run)
}

#[test]
fn rollout_hosts_have_devices_of_their_own() {
    // Neither the policy's devices nor the number of this machine's matter to those of rollout hosts.
    let sets = ["backend=gpu", "devices=4", "roles.rollout={devices: 8, hosts: {min: 2}}"];
    let run = resolve(&sets, &machine()).unwrap();
    let role = run.rollout.clone().unwrap();
    assert_eq!((&role.ordinals.concat()[..], role.devices_of(3, 4)), (&(0..8).collect::<Vec<_>>()[..], 4));
    assert_eq!(
        run.elsewhere(),
        ["rollout on gpu [0, 1, 2, 3, 4, 5, 6, 7] of each of 2 rollout hosts or more"]
    );
    let three = RolloutRole { ordinals: vec![vec![0; 3]], ..role };
    assert_eq!([0, 1, 2, 3].map(|rank| three.devices_of(rank, 4)), [2, 2, 1, 1]);
    // A host without the backend may train what others sample.
    let sets = ["roles.rollout={backend: gone, hosts: {}}"];
    assert_eq!(resolve(&sets, &machine()).unwrap().rollout.unwrap().backend, "gone");
    let sets = ["devices=2", "roles.rollout={devices: 1, hosts: {}}"];
    let error = only_problem(resolve(&sets, &machine()).unwrap_err());
    assert_eq!(error.field, "roles.rollout.hosts.min", "{error}");
    assert!(error.message.contains("have 1 devices, and there are 2 ranks"), "{error}");
}

#[test]
fn a_rollout_host_has_its_own_devices_alone() {
    // The trainer's devices are not here, and those of the role are.
    let sets = ["backend=gone", "devices=8", "pipeline.rlvr.prompts_per_step=8"];
    let run =
        on_rollout_host(&[&sets[..], &["roles.rollout={backend: gpu, hosts: {}}"]].concat(), &machine());
    let error = only_problem(run.unwrap_err());
    assert!(error.message.contains("device 4 is asked for, and `gpu` has 4 here"), "{error}");
    let own = "roles.rollout={backend: gpu, devices: [1, 3], hosts: {}}";
    let run = on_rollout_host(&[&sets[..], &[own]].concat(), &machine()).unwrap();
    assert_eq!(run.rollout.unwrap().ordinals, [[1, 3]]);
    let gone = "roles.rollout={backend: gone, devices: 1, hosts: {}}";
    let error = only_problem(on_rollout_host(&["backend=gpu", gone], &machine()).unwrap_err());
    assert_eq!(error.field, "roles.rollout.backend", "{error}");
    let error = only_problem(on_rollout_host(&["roles.rollout={}"], &machine()).unwrap_err());
    assert!(error.message.contains("its devices are those of the trainer's host"), "{error}");
    let error = only_problem(on_rollout_host(&[], &machine()).unwrap_err());
    assert!(error.message.contains("its devices are those of the trainer's host"), "{error}");
}
