//! Ranks that see a folder each.

use std::{collections::BTreeSet, fs, path::Path};

use anyroll_strategy::{
    ZeroStage,
    checkpoint::{self, Folders, Save, Saver, Stamp},
};
use serde_json::{Value, json};

use crate::harness::{ranks, values, zero};

fn names(folder: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
    names.collect()
}

/// Both folders are whole once each has the other's files, which a store brings. Nothing is told of a folder that one rank
/// makes and another does not see.
#[test]
fn each_folder_has_the_manifest_and_its_ranks_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |rank: usize| folder.path().join(format!("host {rank}/step"));
    let before = ranks(2, false, |device, group| {
        let mut zero = self::zero(ZeroStage::Zero3, true, device, group.clone());
        let mut other = self::zero(ZeroStage::Zero0, false, device, group.clone());
        let save = Save { stamp: Stamp { run: 7, step: 3 }, folders: Folders::OfHosts { is_first: true } };
        let path = path(group.rank());
        let mut saver = Saver::of_run(7).into_folders(save.folders);
        // What rank 0 says counts.
        let extra = json!({ "rank": group.rank() });
        saver
            .at(3)
            .start_with(&mut zero, &path, extra, Some(vec![1]), |folder| {
                checkpoint::save(&mut other, &folder.join("other"), save, Value::Null)
            })
            .unwrap();
        saver.finish(&group).unwrap();
        values(&mut zero)
    });
    for rank in [0, 1] {
        let own = [format!("rank_000{rank}.bin"), format!("rank_000{rank}.own")];
        let all = own.iter().cloned().chain(["manifest.json", "other"].map(str::to_owned));
        assert_eq!(names(&path(rank)), all.collect());
        let other = 1 - rank;
        let missing = ["bin", "own"].map(|kind| path(rank).join(format!("rank_000{other}.{kind}")));
        let of_part = path(rank).join(format!("other/rank_000{other}.bin"));
        assert_eq!(checkpoint::broken(&path(rank)).unwrap(), [&missing[..], &[of_part]].concat());
        assert_eq!(checkpoint::extra(&path(rank)).unwrap(), json!({ "rank": 0 }));
    }
    for file in ["rank_0001.bin", "rank_0001.own", "other/rank_0001.bin"] {
        fs::copy(path(1).join(file), path(0).join(file)).unwrap();
    }
    assert!(checkpoint::broken(&path(0)).unwrap().is_empty());
    let loaded = ranks(1, false, |device, group| {
        let mut zero = zero(ZeroStage::Zero0, true, device, group);
        checkpoint::load(&mut zero, &path(0)).unwrap();
        values(&mut zero)
    });
    assert!(loaded[0] == before[0], "the weights are others");
}
