//! What the host does with device memory.

use quire_ptxsim::{Memory, SimError};

#[test]
fn what_is_copied_is_as_defined_as_it_was() {
    let mut memory = Memory::new();
    let (half, whole) = (memory.alloc_uninit("half", 300), memory.alloc("whole", &[1; 300]));
    memory.write(half + 100, &[2; 50]).expect("inside");
    memory.copy(whole + 10, half + 90, 70).expect("inside");
    for (from, to, written) in
        [(0, 10, true), (10, 20, false), (20, 70, true), (70, 80, false), (80, 300, true)]
    {
        for byte in from..to {
            assert_eq!(memory.is_written(whole + byte, 1), Ok(written), "byte {byte}");
        }
    }
    let mut bytes = [0; 90];
    memory.read_lossy(whole, &mut bytes).expect("inside");
    assert_eq!(bytes[..10], [1; 10]);
    assert_eq!(bytes[10..20], [0xff; 10]);
    assert_eq!(bytes[20..70], [2; 50]);
    assert_eq!(bytes[70..80], [0xff; 10]);
    assert_eq!(bytes[80..], [1; 10]);
    memory.fill(whole, &[3, 4], 300).expect("inside");
    assert_eq!(memory.read(whole + 10, 3), Ok(&[3, 4, 3][..]));
    memory.copy(whole, whole + 1, 299).expect("overlapping");
    assert_eq!(memory.read(whole, 300).expect("defined")[..3], [4, 3, 4]);
}

#[test]
fn accesses_of_the_host_stay_inside() {
    let mut memory = Memory::new();
    let (small, large) = (memory.alloc("small", &[0; 4]), memory.alloc("large", &[0; 8]));
    let errors = [
        memory.copy(small, large, 8),
        memory.copy(large, small, 8),
        memory.fill(small, &[0], 5),
        memory.read_lossy(small + 1, &mut [0; 4]),
        memory.write(small + 4, &[0]),
    ];
    for error in errors {
        let error = error.expect_err("past the end").to_string();
        assert!(error.contains("past the end of `small` (4 bytes)"), "{error}");
    }
}

/// A freed address is not another allocation's soon, and many allocations do not add up.
#[test]
fn freed_places_rest_before_they_are_used_again() {
    let mut memory = Memory::new();
    let first = memory.alloc("first", &[0; 4]);
    memory.free(first).expect("an allocation");
    let mut addresses = Vec::new();
    for _ in 0..5000 {
        let address = memory.alloc_uninit("next", 4);
        memory.free(address).expect("an allocation");
        addresses.push(address);
    }
    let reused = addresses.iter().position(|&address| address == first);
    assert!(reused.is_some_and(|after| after >= 1000), "{reused:?}");
    addresses.sort_unstable();
    addresses.dedup();
    assert!(addresses.len() < 1100, "{} places for one allocation", addresses.len());
    assert!(matches!(memory.free(first), Err(SimError::Host(_))));
}
