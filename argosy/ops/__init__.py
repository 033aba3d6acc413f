"""Pure maths: one public function an op, several implementations. A plain one is the specification of the others."""
