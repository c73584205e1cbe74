// position[b] = (where the document of the last key begins, the number of keys), after steps more keys
$$ set count = batch
$$ if "documents" in bound
{$ include "include/documents.wgsl" $}
$$ endif
fn element(b: u32) {
    let keys = position[2u * b + 1u];
$$ if "documents" in bound
    let start = document_start(b, seqlen - 1u, 0u);
    if (start > 0u) { position[2u * b] = keys + start; }
$$ endif
    position[2u * b + 1u] = keys + {{ steps }}u;
}
{$ include "include/each_element.wgsl" $}
