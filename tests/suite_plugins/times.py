"""Record in the JUnit report where the time of each test goes."""
