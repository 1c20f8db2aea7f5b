module @jit_func attributes {jax.uses_shape_polymorphism = false, mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<256x64xf32>, %arg1: tensor<256xf32>, %arg2: tensor<64x256xf32>, %arg3: tensor<64xf32>, %arg4: tensor<64xf32>, %arg5: tensor<64xf32>, %arg6: tensor<32x64xf32>) -> (tensor<32x64xf32> {jax.result_info = "result[0]"}) {
    %cst = stablehlo.constant dense<1.12837911> : tensor<32x256xf32>
    %cst_0 = stablehlo.constant dense<-0.37612626> : tensor<32x256xf32>
    %cst_1 = stablehlo.constant dense<0.112835854> : tensor<32x256xf32>
    %cst_2 = stablehlo.constant dense<-0.0268538129> : tensor<32x256xf32>
    %cst_3 = stablehlo.constant dense<0.00518832775> : tensor<32x256xf32>
    %cst_4 = stablehlo.constant dense<-8.0101937E-4> : tensor<32x256xf32>
    %cst_5 = stablehlo.constant dense<7.85386146E-5> : tensor<32x256xf32>
    %cst_6 = stablehlo.constant dense<0.000000e+00> : tensor<32x256xf32>
    %cst_7 = stablehlo.constant dense<-88.7228394> : tensor<32x256xf32>
    %cst_8 = stablehlo.constant dense<0.564189494> : tensor<32x256xf32>
    %cst_9 = stablehlo.constant dense<-0.282076746> : tensor<32x256xf32>
    %cst_10 = stablehlo.constant dense<0.42184633> : tensor<32x256xf32>
    %cst_11 = stablehlo.constant dense<-1.01526523> : tensor<32x256xf32>
    %cst_12 = stablehlo.constant dense<2.92101908> : tensor<32x256xf32>
    %cst_13 = stablehlo.constant dense<-7.49551868> : tensor<32x256xf32>
    %cst_14 = stablehlo.constant dense<1.297720e+01> : tensor<32x256xf32>
    %cst_15 = stablehlo.constant dense<-10.477664> : tensor<32x256xf32>
    %cst_16 = stablehlo.constant dense<0.563825965> : tensor<32x256xf32>
    %cst_17 = stablehlo.constant dense<-0.274112701> : tensor<32x256xf32>
    %cst_18 = stablehlo.constant dense<3.404880e-01> : tensor<32x256xf32>
    %cst_19 = stablehlo.constant dense<-0.494451523> : tensor<32x256xf32>
    %cst_20 = stablehlo.constant dense<0.621000468> : tensor<32x256xf32>
    %cst_21 = stablehlo.constant dense<-0.582473278> : tensor<32x256xf32>
    %cst_22 = stablehlo.constant dense<0.368742466> : tensor<32x256xf32>
    %cst_23 = stablehlo.constant dense<-0.138703942> : tensor<32x256xf32>
    %cst_24 = stablehlo.constant dense<2.326820e-02> : tensor<32x256xf32>
    %cst_25 = stablehlo.constant dense<2.000000e+00> : tensor<32x256xf32>
    %cst_26 = stablehlo.constant dense<1.000000e+00> : tensor<32x256xf32>
    %cst_27 = stablehlo.constant dense<9.99999974E-6> : tensor<f32>
    %c = stablehlo.constant dense<0> : tensor<i32>
    %cst_28 = stablehlo.constant dense<6.400000e+01> : tensor<f32>
    %cst_29 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_30 = stablehlo.constant dense<0.707106769> : tensor<f32>
    %cst_31 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %cst_32 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %0 = stablehlo.transpose %arg0, dims = [1, 0] : (tensor<256x64xf32>) -> tensor<64x256xf32>
    %1 = stablehlo.broadcast_in_dim %cst_32, dims = [] : (tensor<f32>) -> tensor<256xf32>
    %2 = stablehlo.multiply %arg1, %1 : tensor<256xf32>
    %3 = stablehlo.dot_general %arg6, %0, contracting_dims = [1] x [0] : (tensor<32x64xf32>, tensor<64x256xf32>) -> tensor<32x256xf32>
    %4 = stablehlo.broadcast_in_dim %cst_32, dims = [] : (tensor<f32>) -> tensor<32x256xf32>
    %5 = stablehlo.multiply %4, %3 : tensor<32x256xf32>
    %6 = stablehlo.broadcast_in_dim %2, dims = [1] : (tensor<256xf32>) -> tensor<1x256xf32>
    %7 = stablehlo.broadcast_in_dim %6, dims = [0, 1] : (tensor<1x256xf32>) -> tensor<32x256xf32>
    %8 = stablehlo.add %7, %5 : tensor<32x256xf32>
    %9 = stablehlo.broadcast_in_dim %cst_31, dims = [] : (tensor<f32>) -> tensor<32x256xf32>
    %10 = stablehlo.multiply %9, %8 : tensor<32x256xf32>
    %11 = stablehlo.negate %8 : tensor<32x256xf32>
    %12 = stablehlo.broadcast_in_dim %cst_30, dims = [] : (tensor<f32>) -> tensor<32x256xf32>
    %13 = stablehlo.multiply %11, %12 : tensor<32x256xf32>
    %14 = stablehlo.multiply %13, %13 : tensor<32x256xf32>
    %15 = stablehlo.negate %14 : tensor<32x256xf32>
    %16 = stablehlo.abs %13 : tensor<32x256xf32>
    %17 = stablehlo.divide %cst_26, %14 : tensor<32x256xf32>
    %18 = stablehlo.exponential %15 : tensor<32x256xf32>
    %19 = stablehlo.divide %cst_26, %16 : tensor<32x256xf32>
    %20 = stablehlo.multiply %18, %19 : tensor<32x256xf32>
    %21 = stablehlo.compare LT, %16, %cst_25 : (tensor<32x256xf32>, tensor<32x256xf32>) -> tensor<32x256xi1>
    %22 = stablehlo.multiply %cst_24, %17 : tensor<32x256xf32>
    %23 = stablehlo.add %22, %cst_23 : tensor<32x256xf32>
    %24 = stablehlo.multiply %23, %17 : tensor<32x256xf32>
    %25 = stablehlo.add %24, %cst_22 : tensor<32x256xf32>
    %26 = stablehlo.multiply %25, %17 : tensor<32x256xf32>
    %27 = stablehlo.add %26, %cst_21 : tensor<32x256xf32>
    %28 = stablehlo.multiply %27, %17 : tensor<32x256xf32>
    %29 = stablehlo.add %28, %cst_20 : tensor<32x256xf32>
    %30 = stablehlo.multiply %29, %17 : tensor<32x256xf32>
    %31 = stablehlo.add %30, %cst_19 : tensor<32x256xf32>
    %32 = stablehlo.multiply %31, %17 : tensor<32x256xf32>
    %33 = stablehlo.add %32, %cst_18 : tensor<32x256xf32>
    %34 = stablehlo.multiply %33, %17 : tensor<32x256xf32>
    %35 = stablehlo.add %34, %cst_17 : tensor<32x256xf32>
    %36 = stablehlo.multiply %35, %17 : tensor<32x256xf32>
    %37 = stablehlo.add %36, %cst_16 : tensor<32x256xf32>
    %38 = stablehlo.multiply %cst_15, %17 : tensor<32x256xf32>
    %39 = stablehlo.add %38, %cst_14 : tensor<32x256xf32>
    %40 = stablehlo.multiply %39, %17 : tensor<32x256xf32>
    %41 = stablehlo.add %40, %cst_13 : tensor<32x256xf32>
    %42 = stablehlo.multiply %41, %17 : tensor<32x256xf32>
    %43 = stablehlo.add %42, %cst_12 : tensor<32x256xf32>
    %44 = stablehlo.multiply %43, %17 : tensor<32x256xf32>
    %45 = stablehlo.add %44, %cst_11 : tensor<32x256xf32>
    %46 = stablehlo.multiply %45, %17 : tensor<32x256xf32>
    %47 = stablehlo.add %46, %cst_10 : tensor<32x256xf32>
    %48 = stablehlo.multiply %47, %17 : tensor<32x256xf32>
    %49 = stablehlo.add %48, %cst_9 : tensor<32x256xf32>
    %50 = stablehlo.multiply %49, %17 : tensor<32x256xf32>
    %51 = stablehlo.add %50, %cst_8 : tensor<32x256xf32>
    %52 = stablehlo.select %21, %37, %51 : tensor<32x256xi1>, tensor<32x256xf32>
    %53 = stablehlo.multiply %20, %52 : tensor<32x256xf32>
    %54 = stablehlo.compare LT, %15, %cst_7 : (tensor<32x256xf32>, tensor<32x256xf32>) -> tensor<32x256xi1>
    %55 = stablehlo.select %54, %cst_6, %53 : tensor<32x256xi1>, tensor<32x256xf32>
    %56 = stablehlo.compare LT, %13, %cst_6 : (tensor<32x256xf32>, tensor<32x256xf32>) -> tensor<32x256xi1>
    %57 = stablehlo.subtract %cst_25, %55 : tensor<32x256xf32>
    %58 = stablehlo.select %56, %57, %55 : tensor<32x256xi1>, tensor<32x256xf32>
    %59 = stablehlo.multiply %13, %13 : tensor<32x256xf32>
    %60 = stablehlo.multiply %cst_5, %59 : tensor<32x256xf32>
    %61 = stablehlo.add %60, %cst_4 : tensor<32x256xf32>
    %62 = stablehlo.multiply %61, %59 : tensor<32x256xf32>
    %63 = stablehlo.add %62, %cst_3 : tensor<32x256xf32>
    %64 = stablehlo.multiply %63, %59 : tensor<32x256xf32>
    %65 = stablehlo.add %64, %cst_2 : tensor<32x256xf32>
    %66 = stablehlo.multiply %65, %59 : tensor<32x256xf32>
    %67 = stablehlo.add %66, %cst_1 : tensor<32x256xf32>
    %68 = stablehlo.multiply %67, %59 : tensor<32x256xf32>
    %69 = stablehlo.add %68, %cst_0 : tensor<32x256xf32>
    %70 = stablehlo.multiply %69, %59 : tensor<32x256xf32>
    %71 = stablehlo.add %70, %cst : tensor<32x256xf32>
    %72 = stablehlo.multiply %13, %71 : tensor<32x256xf32>
    %73 = stablehlo.subtract %cst_26, %72 : tensor<32x256xf32>
    %74 = stablehlo.abs %13 : tensor<32x256xf32>
    %75 = stablehlo.compare LT, %74, %cst_26 : (tensor<32x256xf32>, tensor<32x256xf32>) -> tensor<32x256xi1>
    %76 = stablehlo.select %75, %73, %58 : tensor<32x256xi1>, tensor<32x256xf32>
    %77 = stablehlo.multiply %10, %76 : tensor<32x256xf32>
    %78 = stablehlo.transpose %arg2, dims = [1, 0] : (tensor<64x256xf32>) -> tensor<256x64xf32>
    %79 = stablehlo.broadcast_in_dim %cst_32, dims = [] : (tensor<f32>) -> tensor<64xf32>
    %80 = stablehlo.multiply %arg3, %79 : tensor<64xf32>
    %81 = stablehlo.dot_general %77, %78, contracting_dims = [1] x [0] : (tensor<32x256xf32>, tensor<256x64xf32>) -> tensor<32x64xf32>
    %82 = stablehlo.broadcast_in_dim %cst_32, dims = [] : (tensor<f32>) -> tensor<32x64xf32>
    %83 = stablehlo.multiply %82, %81 : tensor<32x64xf32>
    %84 = stablehlo.broadcast_in_dim %80, dims = [1] : (tensor<64xf32>) -> tensor<1x64xf32>
    %85 = stablehlo.broadcast_in_dim %84, dims = [0, 1] : (tensor<1x64xf32>) -> tensor<32x64xf32>
    %86 = stablehlo.add %85, %83 : tensor<32x64xf32>
    %87 = stablehlo.broadcast_in_dim %cst_32, dims = [] : (tensor<f32>) -> tensor<32x64xf32>
    %88 = stablehlo.multiply %86, %87 : tensor<32x64xf32>
    %89 = stablehlo.add %arg6, %88 : tensor<32x64xf32>
    %90 = stablehlo.reduce(%89 init: %cst_29) applies stablehlo.add across dimensions = [1] : (tensor<32x64xf32>, tensor<f32>) -> tensor<32xf32>
    %91 = stablehlo.broadcast_in_dim %90, dims = [0] : (tensor<32xf32>) -> tensor<32x1xf32>
    %92 = stablehlo.broadcast_in_dim %cst_28, dims = [] : (tensor<f32>) -> tensor<32x1xf32>
    %93 = stablehlo.divide %91, %92 : tensor<32x1xf32>
    %94 = call @_var(%89, %c) : (tensor<32x64xf32>, tensor<i32>) -> tensor<32x1xf32>
    %95 = stablehlo.broadcast_in_dim %cst_27, dims = [] : (tensor<f32>) -> tensor<32x1xf32>
    %96 = stablehlo.add %94, %95 : tensor<32x1xf32>
    %97 = stablehlo.rsqrt %96 : tensor<32x1xf32>
    %98 = stablehlo.broadcast_in_dim %93, dims = [0, 1] : (tensor<32x1xf32>) -> tensor<32x64xf32>
    %99 = stablehlo.subtract %89, %98 : tensor<32x64xf32>
    %100 = stablehlo.broadcast_in_dim %97, dims = [0, 1] : (tensor<32x1xf32>) -> tensor<32x64xf32>
    %101 = stablehlo.multiply %99, %100 : tensor<32x64xf32>
    %102 = stablehlo.broadcast_in_dim %arg4, dims = [1] : (tensor<64xf32>) -> tensor<1x64xf32>
    %103 = stablehlo.broadcast_in_dim %102, dims = [0, 1] : (tensor<1x64xf32>) -> tensor<32x64xf32>
    %104 = stablehlo.multiply %101, %103 : tensor<32x64xf32>
    %105 = stablehlo.broadcast_in_dim %arg5, dims = [1] : (tensor<64xf32>) -> tensor<1x64xf32>
    %106 = stablehlo.broadcast_in_dim %105, dims = [0, 1] : (tensor<1x64xf32>) -> tensor<32x64xf32>
    %107 = stablehlo.add %104, %106 : tensor<32x64xf32>
    return %107 : tensor<32x64xf32>
  }
  func.func private @_var(%arg0: tensor<32x64xf32>, %arg1: tensor<i32>) -> tensor<32x1xf32> {
    %cst = stablehlo.constant dense<0x7FC00000> : tensor<f32>
    %cst_0 = stablehlo.constant dense<6.400000e+01> : tensor<f32>
    %cst_1 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.reduce(%arg0 init: %cst_1) applies stablehlo.add across dimensions = [1] : (tensor<32x64xf32>, tensor<f32>) -> tensor<32xf32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [0] : (tensor<32xf32>) -> tensor<32x1xf32>
    %2 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<32x1xf32>
    %3 = stablehlo.divide %1, %2 : tensor<32x1xf32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [0, 1] : (tensor<32x1xf32>) -> tensor<32x64xf32>
    %5 = stablehlo.subtract %arg0, %4 : tensor<32x64xf32>
    %6 = stablehlo.multiply %5, %5 : tensor<32x64xf32>
    %7 = stablehlo.convert %arg1 : (tensor<i32>) -> tensor<f32>
    %8 = stablehlo.subtract %cst_0, %7 : tensor<f32>
    %9 = stablehlo.reduce(%6 init: %cst_1) applies stablehlo.add across dimensions = [1] : (tensor<32x64xf32>, tensor<f32>) -> tensor<32xf32>
    %10 = stablehlo.broadcast_in_dim %9, dims = [0] : (tensor<32xf32>) -> tensor<32x1xf32>
    %11 = stablehlo.broadcast_in_dim %8, dims = [] : (tensor<f32>) -> tensor<32x1xf32>
    %12 = stablehlo.divide %10, %11 : tensor<32x1xf32>
    %13 = stablehlo.compare GT, %8, %cst_1, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %14 = call @_where(%13, %12, %cst) : (tensor<i1>, tensor<32x1xf32>, tensor<f32>) -> tensor<32x1xf32>
    return %14 : tensor<32x1xf32>
  }
  func.func private @_where(%arg0: tensor<i1>, %arg1: tensor<32x1xf32>, %arg2: tensor<f32>) -> tensor<32x1xf32> {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<32x1xf32>
    %2 = stablehlo.select %arg0, %arg1, %1 : tensor<i1>, tensor<32x1xf32>
    return %2 : tensor<32x1xf32>
  }
}
