use anyroll_backends::{BackendKind, DeviceId, open};
use anyroll_conformance::{device_suite, table};
#[test]
fn device() {
    let d = open(DeviceId { backend: BackendKind::Cpu, ordinal: 0 }).unwrap();
    let o = device_suite(&d, None);
    println!("{}", table(&o));
    for x in &o {
        println!("{:.3} {}", x.elapsed_s, x.name);
    }
}
